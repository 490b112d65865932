"""The daemon as the admin API sees it."""
