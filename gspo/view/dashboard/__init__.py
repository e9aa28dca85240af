"""The live page over run directories: `gspo watch`. Read-only, on loopback, without torch."""
