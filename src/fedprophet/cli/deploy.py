"""`fedprophet deploy`: a fleet of real devices, from the first certificate to the last round."""

import json
import os
import shlex
import shutil
import signal
import socket
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedprophet.deploy import DeployError, environment, require_flower
from fedprophet.display.progress import closing_table
from fedprophet.errors import ConfigError
from fedprophet.sizes import format_count, format_size

if TYPE_CHECKING:
    from fedprophet.deploy.control import Control, RunState
    from fedprophet.deploy.pilot import Pilot

# Flower and its cryptography are an extra: what needs them is imported when a command runs.

deploy_app = typer.Typer(
    help="Train on real devices: a server and nodes on other machines, with Flower, TLS and registered keys.",
    no_args_is_help=True,
)
SOON = timedelta(days=30)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The pilot's folder, made by fedprophet deploy init.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Print = Annotated[bool, typer.Option("--print", help="Only print the plain command, for systemd and the like.")]
Days = Annotated[int, typer.Option(help="Days until the server's certificate ends.", min=1, max=3650)]


@deploy_app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is empty or not there yet.")],
    config: Annotated[
        str | None, typer.Option(metavar="PRESET|FILE", help="What to train. Default: the preset digits.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be repeated.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Short for --set method=…; fedprophet methods lists them.")] = None,
    nodes: Annotated[int, typer.Option(help="Devices to begin with; more can be added.", min=1, max=10_000)] = 2,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Name or address of the server. Repeated: more names for its certificate."),
    ] = None,
    port: Annotated[int, typer.Option(help="The server's port.", min=1, max=65535)] = 9092,
    days: Days = 365,
    json_: AsJson = False,
) -> None:
    """Write all that a pilot needs: certificates, keys, a folder for each device, and a page that says what to start.

    Examples:

      fedprophet deploy init pilot --nodes 3 --server fl.example.org

      fedprophet deploy init pilot --config cifar10-balanced-small --set flower.minimum=2 --server 192.0.2.7

      fedprophet deploy init trial    (everything on this machine)
    """
    require_flower()
    from fedprophet.deploy.pilot import PilotFile, listen_address, make_pilot, pilot_config

    first, *others = server or ["localhost"]
    chosen = pilot_config(config, [*(settings or ()), *([f"method={method}"] if method else ())], nodes)
    file = PilotFile(server=first, names=others, port=port, listen=listen_address(first))
    pilot = make_pilot(folder, chosen, file, nodes, days)
    _show_made(pilot, folder, json_)


def _show_made(pilot: "Pilot", folder: Path, as_json: bool) -> None:
    nodes = {name: str(pilot.folder(name)) for name in pilot.nodes()}
    if as_json:
        expires = pilot.expiry().isoformat()
        document = {"path": str(pilot.path), "server": pilot.file.address, "expires": expires, "nodes": nodes}
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"{pilot.path} is ready: a server at {pilot.file.address} and {_count(len(nodes), 'node')}.")
    typer.echo(f"What to start where is in {pilot.path / 'README.md'}. It begins with:")
    typer.echo(f"  fedprophet deploy server {shlex.quote(str(folder))}")


@deploy_app.command()
def server(folder: Folder, print_: Print = False) -> None:
    """Start the server here; Ctrl-C ends it. Nodes whose key is not in server/keys are refused.

    Examples: fedprophet deploy server pilot     fedprophet deploy server pilot --print
    """
    require_flower()
    from fedprophet.deploy.pilot import check_server, write_connection

    pilot = _pilot(folder)
    check_server(pilot)
    _warn_of_expiry(pilot)
    if not print_:
        _check_free(pilot.file.listen, pilot.file.port, pilot.path / "deploy.toml")
        write_connection(pilot)
        count = _count(len(pilot.nodes()), "node")
        typer.echo(f"Server at {pilot.file.address}; {count} may connect. Ctrl-C ends it.", err=True)
    _become(pilot.command(), pilot.flower, print_)


@deploy_app.command("node")
def node_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The device's folder, such as node-0.")],
    print_: Print = False,
) -> None:
    """Connect this device to the server; Ctrl-C ends it. It waits for a server that is not there yet.

    Examples: fedprophet deploy node node-0     fedprophet deploy node node-0 --print
    """
    require_flower()
    from fedprophet.deploy.node import FILE, open_node

    node = open_node(folder)
    if not print_:
        _check_free("127.0.0.1", node.file.port, node.path / FILE)
        node.home.mkdir(parents=True, exist_ok=True)
        typer.echo(f"Client {node.file.client}, connecting to {node.file.server}. Ctrl-C ends it.", err=True)
    _become(node.command(), node.home / "flower", print_)


@deploy_app.command()
def run(
    folder: Folder,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    name: Annotated[
        str | None, typer.Option(help="The run's folder in DIR/runs. Default: a new one, or the last unfinished.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
) -> None:
    """Start a run on the server's machine, and show what it says. Ctrl-C stops showing; the run goes on.

    Examples:

      fedprophet deploy run pilot

      fedprophet deploy run pilot --resume    (after the server went down)
    """
    require_flower()
    from fedprophet.config.config import load_config
    from fedprophet.deploy import launch
    from fedprophet.deploy.control import connected
    from fedprophet.deploy.pilot import check_names

    # A polite kill is a Ctrl-C: the program that shows the lines ends too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pilot = _pilot(folder)
    check_names(load_config(pilot.config))
    out = launch.stopped_folder(pilot, name) if resume else launch.fresh_folder(pilot, name)
    with connected(pilot.file.here, pilot.authority) as control:
        _refuse_second(control, pilot)
    run_id = launch.submit(pilot, out, resume)
    typer.echo(f"Run {run_id} writes to {out}", err=True)
    if detach:
        return
    _follow(pilot, run_id, out)


@deploy_app.command()
def logs(folder: Folder) -> None:
    """Show what the last run has said, and go on until it ends. Example: fedprophet deploy logs pilot"""
    require_flower()
    from fedprophet.deploy.control import connected

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pilot = _pilot(folder)
    with connected(pilot.file.here, pilot.authority) as control:
        runs = control.runs()
    if not runs:
        raise ConfigError(f"no run was started here. Start one: fedprophet deploy run {folder}")
    _follow(pilot, runs[-1].run_id, Path(runs[-1].out))


def _follow(pilot: "Pilot", run_id: int, out: Path) -> None:
    """Show what a run says until it ends, and then its results; Ctrl-C stops the showing."""
    from fedprophet.deploy import launch

    try:
        launch.watch(pilot, run_id)
    except KeyboardInterrupt:
        path = shlex.quote(str(pilot.path))
        typer.echo(f"\nThe run goes on. See it: fedprophet deploy logs {path}. End it: fedprophet deploy stop {path}")
        return
    _conclude(launch.outcome(pilot, run_id), out, pilot)


def _refuse_second(control: "Control", pilot: "Pilot") -> None:
    from fedprophet.deploy.launch import going_on

    for other in going_on(control):
        text = f"Wait for its end, or end it: fedprophet deploy stop {pilot.path}"
        raise ConfigError(f"run {other.run_id} is going on in {other.out}. {text}")


def _conclude(run: "RunState", out: Path, pilot: "Pilot") -> None:
    from fedprophet.runs.run import RunFiles, read_results

    if run.status == "finished:completed" and RunFiles(out).results.exists():
        # The devices are real: there is no pool whose time could be told.
        closing_table({**read_results(out), "simulated": None}, out, Console())
        return
    # A run that ended before it began has left no folder, and there is nothing to go on with.
    command = f"fedprophet deploy run {shlex.quote(str(pilot.path))}"
    text = f"Start it again: {command}"
    if RunFiles(out).config.exists():
        text = f"Go on with: {command} --name {shlex.quote(out.name)} --resume"
    raise DeployError(f"the run ended as {run.status}{': ' * bool(run.details)}{run.details}. {text}")


@deploy_app.command()
def stop(folder: Folder) -> None:
    """End the run that is going on; its last checkpoint stays. Example: fedprophet deploy stop pilot"""
    require_flower()
    from fedprophet.deploy.control import connected
    from fedprophet.deploy.launch import going_on

    pilot = _pilot(folder)
    with connected(pilot.file.here, pilot.authority) as control:
        runs = going_on(control)
        for run_ in runs:
            control.stop(run_)
            typer.echo(f"Run {run_.run_id} is ended. Go on with: fedprophet deploy run {folder} --resume")
    if not runs:
        typer.echo("No run is going on.")


@deploy_app.command()
def status(folder: Folder, json_: AsJson = False) -> None:
    """Show the server, its certificate, who is connected, and the runs.

    Examples: fedprophet deploy status pilot     fedprophet deploy status pilot --json
    """
    require_flower()
    from fedprophet.deploy.status import pilot_status

    pilot = _pilot(folder)
    document = pilot_status(pilot)
    if json_:
        typer.echo(json.dumps(document, indent=2))
        return
    _show_status(document)
    _warn_of_expiry(pilot)


def _show_status(document: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(f"Server {document['server']}: {'running' if document['running'] else 'not running'}")
    console.print(f"Certificate until {document['expires'][:10]}")
    nodes = Table(title="Nodes")
    for heading in ("Node", "Client", "Status", "Since"):
        nodes.add_column(heading)
    for entry in document["nodes"]:
        nodes.add_row(entry["name"], str(entry["client"]), entry["status"], entry["since"][:19])
    console.print(nodes)
    if document["runs"]:
        runs = Table(title="Runs")
        for heading in ("Run", "Status", "Rounds", "Flower's number"):
            runs.add_column(heading)
        for entry in document["runs"]:
            runs.add_row(entry["name"], entry["status"], str(entry["rounds"]), str(entry["id"] or ""))
        console.print(runs)


@deploy_app.command("add-node")
def add_node_command(
    folder: Folder,
    client: Annotated[
        int | None, typer.Option(help="Which client it is. Default: the first without a node.", min=0, max=9_999)
    ] = None,
    public_key: Annotated[
        Path | None, typer.Option(help="A key made on the device (ssh-keygen -t ecdsa -b 384); no private key here.")
    ] = None,
    json_: AsJson = False,
) -> None:
    """Make a folder for one more device and let its key connect; a running server knows it at once.

    Examples: fedprophet deploy add-node pilot     fedprophet deploy add-node pilot --public-key node.key.pub
    """
    require_flower()
    from fedprophet.deploy.keys import registered_form
    from fedprophet.deploy.pilot import add_node, client_of, raise_clients

    pilot = _pilot(folder)
    name = add_node(pilot, client, public_key)
    told = _tell(pilot, lambda control: control.register(registered_form(pilot.keys / f"{name}.pub"), name))
    raised = raise_clients(pilot, client_of(name) + 1)
    if json_:
        document = {"name": name, "path": str(pilot.folder(name)), "server_told": told, "clients_raised": raised}
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"{pilot.folder(name)} is ready: copy it to the device and start it there.")
    typer.echo("The running server knows its key." if told else "The server knows its key from its next start on.")
    if raised:
        typer.echo(f"population.clients in config.toml is now {client_of(name) + 1}; a run under way stays as it is.")


@deploy_app.command("remove-node")
def remove_node_command(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NODE", help="Its name, such as node-1.")],
) -> None:
    """Refuse a device from now on, as when it was lost. Example: fedprophet deploy remove-node pilot node-1"""
    require_flower()
    from fedprophet.deploy.pilot import remove_node

    pilot = _pilot(folder)
    key = remove_node(pilot, name)

    def unregister(control: "Control") -> None:
        node = control.nodes().get(key)
        if node is not None:
            control.unregister(node)

    told = _tell(pilot, unregister)
    typer.echo(f"{name} is refused {'from now on' if told else 'when the server starts again'}.")


@deploy_app.command("renew")
def renew_command(folder: Folder, days: Days = 365) -> None:
    """Give the server a new certificate; the nodes need nothing new. Example: fedprophet deploy renew pilot"""
    require_flower()
    from fedprophet.deploy.pilot import renew

    end = renew(_pilot(folder), days)
    typer.echo(f"The server's certificate now ends on {end:%Y-%m-%d}. A running server uses it after its next start.")


@deploy_app.command()
def probe(
    home: Annotated[Path, typer.Option(help="A node's home, where what was measured is kept.")] = Path(
        "~/.local/share/fedprophet"
    ),
    threads: Annotated[int, typer.Option(help="CPU cores for training; 0: torch's own number.", min=0, max=1024)] = 0,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    json_: AsJson = False,
) -> None:
    """Show what this machine can spare for training, as a node would report it.

    Examples: fedprophet deploy probe     fedprophet deploy probe --home node-0/home --refresh --json
    """
    import torch

    from fedprophet.deploy.probe import machine_resources

    found = machine_resources(home.expanduser(), refresh=refresh, threads=threads or torch.get_num_threads())
    if json_:
        document = {"memory_bytes": found.memory, "flops": found.performance, "bandwidth": found.bandwidth}
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"Memory that is free    {format_size(found.memory)}")
    typer.echo(f"FLOP rate of training  {format_count(round(found.performance))}FLOPS")
    typer.echo(f"Storage                {format_size(round(found.bandwidth))}/s")


# What commands share -------------------------------------------------------------------------------------------------


def _pilot(folder: Path) -> "Pilot":
    from fedprophet.deploy.pilot import open_pilot

    return open_pilot(folder)


def _tell(pilot: "Pilot", message: Any) -> bool:
    """Tell a running server something; return whether there was one."""
    from fedprophet.deploy.control import NoAnswerError, connected

    try:
        with connected(pilot.file.here, pilot.authority) as control:
            message(control)
    except NoAnswerError:
        return False
    return True


def _warn_of_expiry(pilot: "Pilot") -> None:
    left = pilot.expiry() - datetime.now(UTC)
    if left < SOON:
        text = f"ends in {max(0, left.days)} days. Do: fedprophet deploy renew {pilot.path}"
        typer.echo(f"warning: the server's certificate {text}", err=True)


def _check_free(host: str, port: int, place: Path) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe_:
        probe_.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_.bind((host, port))
        except OSError as error:
            text = f"Is it running already? Else set another port in {place}"
            raise DeployError(f"cannot listen at {host} port {port}: {error.strerror}. {text}") from None


def _become(command: list[str], flower_home: Path, only_print: bool) -> None:
    """Become another program, so that its signals are its own; or say what it would be."""
    variables = environment(flower_home)
    if only_print:
        changed = {name: value for name, value in variables.items() if os.environ.get(name) != value}
        lines = [*(f"export {name}={shlex.quote(value)}" for name, value in changed.items()), shlex.join(command)]
        typer.echo("\n".join(lines))
        return
    if shutil.which(command[0], path=variables["PATH"]) is None:
        raise DeployError(f"{command[0]} is not in the path. Install Flower again: pip install 'fedprophet[flower]'")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, variables)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
