"""Doors to other libraries: each file needs the library that it is named after, and nothing else imports it."""
