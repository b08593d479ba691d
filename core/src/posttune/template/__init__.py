"""The cookiecutter template of plugins, and what makes a project of it."""
