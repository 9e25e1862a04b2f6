"""Package loader: teams from outside. In: the path of a YAML file, or `module:attribute`. Out: an `Ensemble`.

What is wrong with a file is named with file, line and column, everything at once. No tag of YAML is followed, nothing
is constructed from the text but plain data; user code runs only where the file names it as `module:attribute`.
"""

from ensemble_ray.teamfile.targets import Runnable, find_planned_form, load_ensemble, load_runnable, load_source

__all__ = ["Runnable", "find_planned_form", "load_ensemble", "load_runnable", "load_source"]
