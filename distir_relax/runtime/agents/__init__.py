"""Ranks on several hosts: an agent for each host, which starts its ranks and watches them, and the launcher's part."""
