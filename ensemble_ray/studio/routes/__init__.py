"""The routes below `api/studio/`, and the page's files."""
