"""The edge over HTTP: one team behind Ray Serve, `serve run ensemble_ray.serve.app:app`.

It imports the core's face and its loader; it holds no run state and decides nothing. Not to be confused with Ray's own
module, which is always `from ray import serve as ray_serve` here.
"""
