"""{{ cookiecutter.description | replace('\\', '\\\\') | replace('"', '\\"') }}"""

{% include "plugin/" ~ cookiecutter.kind ~ ".jinja" %}