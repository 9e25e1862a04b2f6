"""`python -m ensemble_ray.serve OPTIONS`: what `ensemble-ray serve` becomes; OPTIONS is JSON. Package: serve."""

from __future__ import annotations

import json
import os
import sys

from ensemble_ray.cli.view.failures import describe_error, exit_code_of
from ensemble_ray.cli.view.terminal import FINE, say
from ensemble_ray.definition.model_keys import check_model_keys
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.loader import find_planned_form
from ensemble_ray.serve.team import load_teams, team_names


def main(argument: str) -> int:
    """Serve, and return the exit code.

    Args:
        argument: JSON object with `host`, `port`, `name` and the arguments of the application.
    """
    options = json.loads(argument)
    try:
        # Ray Serve takes seconds to load; what is wrong with a team is told before.
        teams = load_teams(team_names(options["ensembles"]))
        for team in teams.values():
            if not os.environ.get("RAY_ADDRESS", "").strip():  # on a cluster its processes have the keys
                check_model_keys(find_planned_form(team.definition) or team.definition, with_named=True)
        from ensemble_ray.serve.starting import EndpointPlace, serve_until_interrupted
    except (EnsembleError, ValidationError) as error:
        say(describe_error(error))
        return exit_code_of(error)
    except ImportError as error:
        say(f'The endpoint needs Ray Serve ({error.name} is missing). What to do: pip install "ensemble-ray[serve]"')
        return exit_code_of(ValidationError(str(error)))
    place, name = EndpointPlace(host=options.pop("host"), port=options.pop("port")), str(options.pop("name"))
    try:
        serve_until_interrupted(options, place, name=name, teams=teams)
    except (EnsembleError, ValidationError) as error:
        say(describe_error(error))
        return exit_code_of(error)
    return FINE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
