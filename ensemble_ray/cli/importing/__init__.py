"""Team files made of what other frameworks keep their teams in. Package: cli."""
