"""Programs written for other frameworks, as they stand: their objects, on a session of elastune's."""
