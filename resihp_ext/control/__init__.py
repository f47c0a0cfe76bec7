"""Who is alive and what everyone is to do: messages, their transport, the coordinator's rules."""
