PARSERS = ("auto", "hermes", "none")
