"""The pages of the console; ``metaq.server.console.visit`` says how one is added."""
