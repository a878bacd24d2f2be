"""The ClientApp: what Flower starts on a node. One handler answers every message; nothing it is sent can end it."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedprophet.flower.leave import leave_when
from fedprophet.flower.node import answer


def make_app(leave: str | None = None) -> ClientApp:
    """Return the app; its process ends as soon as the file `leave` exists, even in the middle of a task."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        if leave is not None:
            leave_when(leave)
        return Message(answer(message.content, context.node_config), reply_to=message)

    return app


app = make_app()
