"""Who may ask an endpoint: keys, where they are kept, and the decision about one request. It knows no web framework."""
