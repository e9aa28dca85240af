"""The live dashboard of run directories, `gspo watch`: read-only, on loopback, without torch."""
