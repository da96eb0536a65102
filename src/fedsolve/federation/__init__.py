"""Who asks and who answers: messages, participants, engines, methods and their loop."""
