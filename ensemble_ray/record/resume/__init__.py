"""The recorded state from which a run resumes, and the part of it that a fork copies."""
