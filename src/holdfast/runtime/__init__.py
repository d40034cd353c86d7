"""asyncio shells around the pure machines; nothing is decided here."""
