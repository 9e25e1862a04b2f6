"""Runs in forked children: of Celery, gunicorn, `multiprocessing`, `os.fork`."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble_ray import Agent, Ensemble, InlineRuntime, RateLimit, SqliteMemory, Task, load_trace, tool
from ensemble_ray.llm.openai import OpenAIChatModel
from ensemble_ray.testing import ModelServer, Reply, ScriptedModel
from tests.forking import Child, call_in_child

pytestmark = [pytest.mark.program, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]
