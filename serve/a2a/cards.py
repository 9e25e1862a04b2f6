"""A team's agent card: what it takes, where it is asked, with what key (S-INT-71). Pure."""

from __future__ import annotations

from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentExtension,
    AgentInterface,
    AgentSkill,
    HTTPAuthSecurityScheme,
    SecurityRequirement,
    SecurityScheme,
    StringList,
)
from a2a.utils.constants import PROTOCOL_VERSION_0_3, PROTOCOL_VERSION_1_0, TransportProtocol

from ensemble_ray.process.config import package_version
from ensemble_ray.serve.run_schemas import EnsembleInfo
from ensemble_ray.tools.a2a.connecting import IDEMPOTENT_MESSAGES

_SENT_AGAIN = "A message that is sent again with the same messageId is the same task"
_TEXT, _JSON = "text/plain", "application/json"
#: Name of the scheme in the card.
_KEY = "key"


def agent_card(info: EnsembleInfo, url: str, *, asks_for_keys: bool) -> AgentCard:
    """Return the card of a team.

    Args:
        info: The team.
        url: Where its messages are sent.
        asks_for_keys: Whether the endpoint knows callers by their keys.
    """
    takes_text = not missing_beside_text(info)
    modes = [_TEXT, _JSON] if takes_text else [_JSON]
    card = AgentCard(
        name=info.name,
        description=info.description or f"The team '{info.name}': {_size(info)}, {info.workflow}",
        version=package_version(),
        supported_interfaces=[
            AgentInterface(url=url, protocol_binding=TransportProtocol.JSONRPC.value, protocol_version=version)
            for version in (PROTOCOL_VERSION_1_0, PROTOCOL_VERSION_0_3)
        ],
        capabilities=AgentCapabilities(
            streaming=True,
            push_notifications=False,
            extended_agent_card=False,
            extensions=[AgentExtension(uri=IDEMPOTENT_MESSAGES, description=_SENT_AGAIN)],
        ),
        default_input_modes=modes,
        default_output_modes=[_TEXT, _JSON],
        skills=[
            AgentSkill(
                id="run",
                name=f"Run {info.name}",
                description=_how_to_ask(info, takes_text=takes_text),
                tags=[info.workflow, *(f"{name}:{value}" if value else name for name, value in info.tags.items())],
            )
        ],
    )
    if asks_for_keys:
        scheme = HTTPAuthSecurityScheme(scheme="bearer", description="A key of this endpoint")
        card.security_schemes[_KEY].CopyFrom(SecurityScheme(http_auth_security_scheme=scheme))
        card.security_requirements.append(SecurityRequirement(schemes={_KEY: StringList()}))
    return card


def missing_beside_text(info: EnsembleInfo) -> list[str]:
    """Return what stands in the way of a text alone: inputs that would have no value, or that there is none for it."""
    if info.chat.input is None:
        return list(info.inputs) or ["an input"]
    return [name for name in info.inputs if name != info.chat.input]


def _size(info: EnsembleInfo) -> str:
    match info.tasks:
        case None:
            return "tasks that are made while it runs"
        case 1:
            return "one task"
        case count:
            return f"{count} tasks"


def _how_to_ask(info: EnsembleInfo, *, takes_text: bool) -> str:
    example = ", ".join(f'"{name}": ...' for name in info.inputs)
    data = f"a data part {{{example}}}"
    if not takes_text:
        return f"Takes {data}"
    return f"Takes a text, which is the input '{info.chat.input}', or {data}"
