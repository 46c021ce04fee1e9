"""Integrations: each module needs the library it is named after, and the rest of ringspan does not import it."""
