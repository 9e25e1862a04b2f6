"""`python -m ensemble_ray.serve OPTIONS`: the process of `ensemble-ray serve`. OPTIONS is JSON."""

from __future__ import annotations

import json
import sys

from ensemble_ray.cli.inputs.arguments import check_team_keys_here
from ensemble_ray.cli.view.failures import describe_error, exit_code_of
from ensemble_ray.cli.view.terminal import FINE, write_note
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.execute.review.handlers import ConsoleReviewHandler
from ensemble_ray.serve.catalog import load_teams, team_names
from ensemble_ray.values.reviews import ReviewWait


def main(argument: str) -> int:
    """Serve, and return the exit code. `argument` is JSON with `host`, `port`, `name` and the application's arguments."""
    options = json.loads(argument)
    try:
        # Before Ray Serve, which takes seconds to load.
        teams = load_teams(team_names(options["ensembles"]))
        check_team_keys_here({name: team.definition for name, team in teams.items()}, "ray")
        for team_name, team in teams.items():
            handler, wait = team.definition.review_handler, team.definition.review_wait
            if isinstance(handler, ConsoleReviewHandler) and wait is ReviewWait.ATTACHED:
                write_note(
                    f"Team '{team_name}': its reviews are asked at the console, and a served run has none, so they end the run early. "
                    "Set review_wait: detach in the team, and decide at POST /reviews"
                )
        from ensemble_ray.serve.app import EndpointPlace, serve_until_interrupted
    except (EnsembleError, ValidationError) as error:
        write_note(describe_error(error))
        return exit_code_of(error)
    except ImportError as error:
        write_note(
            f'The endpoint needs Ray Serve ({error.name} is missing). What to do: pip install "ensemble-ray[serve]"'
        )
        return exit_code_of(ValidationError(str(error)))
    place, name = EndpointPlace(host=options.pop("host"), port=options.pop("port")), str(options.pop("name"))
    drain_s = float(options.pop("drain_s", 0.0))
    try:
        serve_until_interrupted(options, place, name=name, teams=teams, drain_s=drain_s)
    except (EnsembleError, ValidationError) as error:
        write_note(describe_error(error))
        return exit_code_of(error)
    return FINE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
