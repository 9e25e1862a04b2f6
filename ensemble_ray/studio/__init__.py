"""Studio: what runs recorded, as data for a page; what may be done with them, and the server of both."""
