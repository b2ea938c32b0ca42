"""The one exception whose message is shown to the user without a trace."""


class UserError(Exception):
    """A mistake the user can mend; the message is one sentence: what came, what is allowed, what to do."""
