"""`python -m ensemble_ray.cli`: the same as `ensemble-ray`."""

from ensemble_ray.cli import main

main()
