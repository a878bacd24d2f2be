"""`fedprophet deploy`: a fleet of real devices, from the first certificate to the last round."""

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from fedprophet.cli.options import AsJson, Logs, MethodName, Overrides, print_json, tell, with_method
from fedprophet.cli.report import make_report
from fedprophet.config.load import load_config
from fedprophet.console import console_on
from fedprophet.deploy import DeployError, environment, require_flower
from fedprophet.deploy.probe import machine_resources
from fedprophet.display.numbers import counted
from fedprophet.display.summary import show_finished
from fedprophet.display.tables import Column, Page, Table, show
from fedprophet.errors import ConfigError
from fedprophet.runs.files import RunFiles
from fedprophet.sizes import format_count, format_size
from fedprophet.tracking import open_trackers

if TYPE_CHECKING:
    from fedprophet.deploy.control import Control, RunState
    from fedprophet.deploy.pilot import Pilot

# Flower and cryptography are an extra: modules that need them are imported when a command runs.

deploy_app = typer.Typer(
    help="Train on real devices: a server, and nodes on other machines, with Flower, TLS and registered keys.",
    no_args_is_help=True,
)
SOON = timedelta(days=30)
NODE_HOME = Path("~/.local/share/fedprophet")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The pilot's folder, made by fedprophet deploy init.")]
Print = Annotated[bool, typer.Option("--print", help="Only print the plain command, for systemd and the like.")]
Days = Annotated[int, typer.Option(help="Days until the server's certificate expires.", min=1, max=3650)]


# A pilot and its nodes -----------------------------------------------------------------------------------------------


@deploy_app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is empty or does not exist yet.")],
    config: Annotated[
        str | None, typer.Option(metavar="PRESET|FILE", help="What to train. Default: the preset digits.")
    ] = None,
    settings: Overrides = None,
    method: MethodName = None,
    nodes: Annotated[int, typer.Option(help="Devices at the start; more can be added.", min=1, max=10_000)] = 2,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Name or address of the server. Repeated: more names for its certificate."),
    ] = None,
    port: Annotated[int, typer.Option(help="The server's port.", min=1, max=65535)] = 9092,
    days: Days = 365,
    json_: AsJson = False,
) -> None:
    """Write everything a pilot needs: certificates, keys, a folder for each device, and instructions.

    Examples:

      fedprophet deploy init pilot --nodes 3 --server fl.example.org

      fedprophet deploy init pilot --config cifar10-balanced-small --set aggregate.minimum=2 --server 192.0.2.7

      fedprophet deploy init trial    # everything on this machine
    """
    require_flower()
    from fedprophet.deploy.pilot import PilotFile, listen_address, make_pilot, pilot_config

    first, *others = server or ["localhost"]
    chosen = pilot_config(config, with_method(settings, method=method), nodes)
    file = PilotFile(server=first, names=others, port=port, listen=listen_address(first))
    pilot = make_pilot(folder, chosen, file, nodes, days)
    folders = {name: str(pilot.folder(name)) for name in pilot.nodes()}
    if json_:
        expires = pilot.expiry().isoformat()
        print_json({"path": str(pilot.path), "server": pilot.file.address, "expires": expires, "nodes": folders})
        return
    tell(f"{pilot.path} is ready: a server at {pilot.file.address} and {counted(len(folders), 'node')}.")
    tell(f"Instructions are in {pilot.path / 'README.md'}. The first step:")
    typer.echo(f"  fedprophet deploy server {shlex.quote(str(folder))}")


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
    pilot = _pilot(folder)
    from fedprophet.deploy.keys import registered_form
    from fedprophet.deploy.pilot import add_node, client_of, raise_clients

    name = add_node(pilot, client, public_key)
    told = _tell(pilot, lambda control: control.register(registered_form(pilot.keys / f"{name}.pub"), name))
    raised = raise_clients(pilot, client_of(name) + 1)
    if json_:
        path = str(pilot.folder(name))
        print_json({"name": name, "path": path, "server_told": told, "clients_raised": raised})
        return
    tell(f"{pilot.folder(name)} is ready: copy it to the device and start it there.")
    tell("The running server knows its key." if told else "The server will know its key after its next start.")
    if raised:
        tell(f"population.clients in config.toml is now {client_of(name) + 1}, from the next run on.")


@deploy_app.command("remove-node")
def remove_node_command(
    folder: Folder,
    name: Annotated[str, typer.Argument(metavar="NODE", help="Its name, such as node-1.")],
) -> None:
    """Refuse a device from now on, such as one that was lost. Example: fedprophet deploy remove-node pilot node-1"""
    pilot = _pilot(folder)
    from fedprophet.deploy.pilot import remove_node

    key = remove_node(pilot, name)

    def unregister(control: "Control") -> None:
        node = control.nodes().get(key)
        if node is not None:
            control.unregister(node)

    told = _tell(pilot, unregister)
    tell(f"{name} is refused {'from now on' if told else 'from the next start of the server on'}.")


@deploy_app.command("renew")
def renew_command(folder: Folder, days: Days = 365) -> None:
    """Give the server a new certificate; nodes need no change. Example: fedprophet deploy renew pilot"""
    pilot = _pilot(folder)
    from fedprophet.deploy.pilot import renew

    expires = f"The server's new certificate expires on {renew(pilot, days):%Y-%m-%d}."
    tell(f"{expires} A running server uses it after its next start.")


# Server and nodes ----------------------------------------------------------------------------------------------------


@deploy_app.command()
def server(folder: Folder, print_: Print = False) -> None:
    """Start the server here; Ctrl-C ends it. Nodes whose key is not in server/keys are refused.

    Examples: fedprophet deploy server pilot     fedprophet deploy server pilot --print
    """
    pilot = _pilot(folder)
    from fedprophet.deploy.pilot import check_server, write_connection

    check_server(pilot)
    _warn_of_expiry(pilot)
    if not print_:
        _check_free(pilot.file.listen, pilot.file.port, pilot.path / "deploy.toml")
        write_connection(pilot)
        count = counted(len(pilot.nodes()), "node")
        tell(f"Server at {pilot.file.address}; {count} may connect. Ctrl-C ends it.", err=True)
    _become(pilot.command(), pilot.flower, print_)


@deploy_app.command("node")
def node_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The device's folder, such as node-0.")],
    print_: Print = False,
) -> None:
    """Connect this device to the server; Ctrl-C ends it. If the server is not running yet, it waits.

    Examples: fedprophet deploy node node-0     fedprophet deploy node node-0 --print
    """
    require_flower()
    from fedprophet.deploy.node import FILE, open_node

    node = open_node(folder)
    if not print_:
        _check_free("127.0.0.1", node.file.port, node.path / FILE)
        node.home.mkdir(parents=True, exist_ok=True)
        tell(f"Client {node.file.client}, connecting to {node.file.server}. Ctrl-C ends it.", err=True)
    _become(node.command(), node.home / "flower", print_)


def _check_free(host: str, port: int, place: Path) -> None:
    """Raise DeployError if a port is in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe_:
        probe_.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_.bind((host, port))
        except OSError as error:
            text = f"Is it already running? Otherwise set another port in {place}"
            raise DeployError(f"cannot listen on {host} port {port}: {error.strerror}. {text}") from None


def _become(command: list[str], flower_home: Path, only_print: bool) -> None:
    """Replace this process by another program, which then gets all signals; or print its command."""
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


# Runs ----------------------------------------------------------------------------------------------------------------


@deploy_app.command()
def run(
    folder: Folder,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a run that was stopped.")] = False,
    from_round: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With --resume: go back to the checkpoint of round N.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The run's folder in DIR/runs. Default: a new one, or the last unfinished one.")
    ] = None,
    log: Logs = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
) -> None:
    """Start a run, on the server's machine, and show its output. Ctrl-C stops the output; the run continues.

    Examples:

      fedprophet deploy run pilot

      fedprophet deploy run pilot --resume    # after the server went down

      fedprophet deploy run pilot --log tensorboard
    """
    pilot = _pilot(folder)
    open_trackers(log or (), "--log")  # the server, on this machine, opens its own
    from fedprophet.deploy import launch
    from fedprophet.deploy.control import connected
    from fedprophet.deploy.pilot import check_names

    if from_round is not None and not resume:
        raise ConfigError("--from-round goes with --resume: it says which of the run's checkpoints to go on from")
    check_names(load_config(pilot.config))
    out = launch.stopped_folder(pilot, name) if resume else launch.fresh_folder(pilot, name)
    with connected(pilot.file.here, pilot.authority) as control:
        for other in launch.unfinished_runs(control):
            text = f"Wait for its end, or end it: fedprophet deploy stop {pilot.typed}"
            raise ConfigError(f"run {other.run_id} is still running in {other.out}. {text}")
    run_id = launch.submit(pilot, out, resume, from_round, log or ())
    tell(f"Run {run_id} writes to {out}", err=True)
    if not detach:
        _follow(pilot, run_id, out)


@deploy_app.command()
def logs(folder: Folder) -> None:
    """Show the output of the last run until it ends. Example: fedprophet deploy logs pilot"""
    pilot = _pilot(folder)
    from fedprophet.deploy.control import connected

    with connected(pilot.file.here, pilot.authority) as control:
        runs = control.runs()
    if not runs:
        raise ConfigError(f"no run was started here. Start one: fedprophet deploy run {pilot.typed}")
    _follow(pilot, runs[-1].run_id, Path(runs[-1].out))


def _follow(pilot: "Pilot", run_id: int, out: Path) -> None:
    """Show a run's output until it ends, then its results; Ctrl-C stops the output."""
    from fedprophet.deploy import launch

    try:
        launch.watch(pilot, run_id)
    except KeyboardInterrupt:
        show, end = (f"fedprophet deploy {command} {pilot.typed}" for command in ("logs", "stop"))
        tell(f"\nThe run continues. Show it: {show}. End it: {end}")
        return
    _conclude(launch.outcome(pilot, run_id), out, pilot)


def _conclude(run: "RunState", out: Path, pilot: "Pilot") -> None:
    if run.status == "finished:completed" and RunFiles(out).results.exists():
        show_finished(out, console_on())
        make_report(out)
        return
    command = f"fedprophet deploy run {pilot.typed}"
    text = f"Start it again: {command}"
    if RunFiles(out).config.exists():  # otherwise it ended before its first round: there is nothing to resume
        text = f"Resume it with: {command} --name {shlex.quote(out.name)} --resume"
    raise DeployError(f"the run ended as {run.status}{': ' * bool(run.details)}{run.details}. {text}")


@deploy_app.command()
def stop(folder: Folder) -> None:
    """End the current run; its last checkpoint stays. Example: fedprophet deploy stop pilot"""
    pilot = _pilot(folder)
    from fedprophet.deploy.control import connected
    from fedprophet.deploy.launch import unfinished_runs

    with connected(pilot.file.here, pilot.authority) as control:
        runs = unfinished_runs(control)
        for run_ in runs:
            control.stop(run_)
            tell(f"Run {run_.run_id} is ended. Resume it with: fedprophet deploy run {pilot.typed} --resume")
    if not runs:
        tell("No run is running.")


@deploy_app.command()
def status(folder: Folder, json_: AsJson = False) -> None:
    """Show the server, its certificate, the nodes and the runs.

    Examples: fedprophet deploy status pilot     fedprophet deploy status pilot --json
    """
    pilot = _pilot(folder)
    from fedprophet.deploy.status import pilot_status

    document = pilot_status(pilot)
    if json_:
        print_json(document)
        return
    show(_status_page(document))
    _warn_of_expiry(pilot)


def _status_page(document: dict[str, Any]) -> Page:
    def table(title: str, kind: str, **columns: str) -> Table:
        rows = tuple(tuple(entry[key] for key in columns) for entry in document[kind])
        return Table(title, tuple(map(Column, columns.values())), rows, labels=len(columns))

    tables = [table("Nodes", "nodes", name="Node", client="Client", status="Status", since="Since")]
    if document["runs"]:
        tables.append(table("Runs", "runs", name="Run", status="Status", rounds="Rounds", id="Flower's number"))
    state = "running" if document["running"] else "not running"
    certificate = f"Its certificate expires on {document['expires'][:10]}"
    return Page(f"Server {document['server']}: {state}", tuple(tables), lines=(certificate,))


# This machine --------------------------------------------------------------------------------------------------------


@deploy_app.command()
def probe(
    home: Annotated[Path, typer.Option(help="A node's home, where the measured rates are kept.")] = NODE_HOME,
    threads: Annotated[int, typer.Option(help="CPU cores for training; 0: torch's own number.", min=0, max=1024)] = 0,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    json_: AsJson = False,
) -> None:
    """Show this machine's available resources, as a node would report them.

    Examples: fedprophet deploy probe     fedprophet deploy probe --home node-0/home --refresh --json
    """
    found = machine_resources(home.expanduser(), refresh=refresh, threads=threads or torch.get_num_threads())
    if json_:
        print_json({"memory_bytes": found.memory, "flops": found.performance, "bandwidth": found.bandwidth})
        return
    tell(f"Available memory       {format_size(found.memory)}")
    tell(f"FLOP rate of training  {format_count(round(found.performance))}FLOPS")
    tell(f"Storage                {format_size(round(found.bandwidth))}/s")


# What commands share -------------------------------------------------------------------------------------------------


def _pilot(folder: Path) -> "Pilot":
    require_flower()
    from fedprophet.deploy.pilot import open_pilot

    return open_pilot(folder)


def _tell(pilot: "Pilot", message: Callable[["Control"], None]) -> bool:
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
        text = f"expires in {max(0, left.days)} days. Renew it: fedprophet deploy renew {pilot.typed}"
        tell(f"warning: the server's certificate {text}", err=True)
