"""A session over a chain of servers: its ops, its repair, and the checks of what servers answer."""
