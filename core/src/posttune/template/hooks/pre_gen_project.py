"""Refuse what would make a broken package, before anything is written."""

import json
import keyword
import re
import sys

# The JSON that tojson writes holds no single quote.
NAME, *TEXTS = json.loads(
    r'{{ [cookiecutter.name, cookiecutter.description, cookiecutter.author] | tojson }}'
)

if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", NAME) or keyword.iskeyword(NAME):
    sys.exit(
        f"posttune: {NAME!r} cannot name a plugin: use lower case letters, digits and single underscores"
    )
if any(not text.strip() or not text.isprintable() for text in TEXTS):
    sys.exit("posttune: description and author are one line of text each")
