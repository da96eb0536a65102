"""Pages for people: Jinja2 templates and one stylesheet. Knows no federation."""
