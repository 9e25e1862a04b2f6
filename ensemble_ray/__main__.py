"""`python -m ensemble_ray`: the same as the command `ensemble-ray`."""

from ensemble_ray.cli import main

main()
