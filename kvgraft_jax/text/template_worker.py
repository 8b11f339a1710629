"""Renders a chat template as the reference does, in a process of its own that may use little time and memory.

`python -m kvgraft_jax.text.template_worker` reads one JSON document from stdin, {"template": text, "probes":
[variables of one rendering, ...]}, and answers on stdout with {"error": text} for a template that does not parse, or
{"prompts": [{"text": prompt} or {"error": text}, ...]}.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys

import jinja2
from jinja2 import ext, nodes, parser, sandbox

SECONDS = 10
MEMORY_BYTES = 1 << 30
MAX_PROMPT_CHARS = 100_000


class _Generation(ext.Extension):
    """The block that marks an answer for training; what stands in it is rendered as it is."""

    tags = {"generation"}

    def parse(self, parsed: parser.Parser) -> list[nodes.Node]:
        next(parsed.stream)
        return parsed.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _limit(kind: int, wanted: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _render(template: jinja2.Template, variables: dict) -> dict[str, str]:
    try:
        text = template.render(**variables)
    except Exception as error:  # A template is a program and may raise anything.
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    if len(text) > MAX_PROMPT_CHARS:
        return {"error": f"writes {len(text)} characters, wanted at most {MAX_PROMPT_CHARS}"}
    return {"text": text}


def main() -> None:
    """Answers the request on stdin."""
    request = json.load(sys.stdin)
    _limit(resource.RLIMIT_CPU, SECONDS)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    try:
        template = _environment().from_string(request["template"])
    except Exception as error:  # The parser recurses, so that errors of Python come out of it, too.
        json.dump({"error": f"{type(error).__name__}: {str(error)[:300]}"}, sys.stdout)
        return
    json.dump({"prompts": [_render(template, variables) for variables in request["probes"]]}, sys.stdout)


if __name__ == "__main__":
    main()
