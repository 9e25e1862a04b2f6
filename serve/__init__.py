"""The HTTP endpoint: teams behind Ray Serve, `serve run ensemble_ray.serve.app:app`.

It holds no state of runs. A function raises `Refusal` if the endpoint rejects the request. Ray's own module is always imported as `ray_serve`.
"""
