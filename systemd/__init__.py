"""batond as a system service: units, user, folders, an example configuration, and how they are installed."""
