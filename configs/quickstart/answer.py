"""Answer one prompt with an exported model, with transformers alone.

Usage: python answer.py FOLDER PROMPT
"""

from __future__ import annotations

import sys

from transformers import pipeline


def main() -> None:
    """Print the prompt and the greedy answer."""
    folder, prompt = sys.argv[1:]
    generate = pipeline("text-generation", model=folder)
    (answer,) = generate(prompt, max_new_tokens=8, do_sample=False, return_full_text=False)
    print(f"{prompt} {answer['generated_text']}")


if __name__ == "__main__":
    main()
