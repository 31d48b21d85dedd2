"""The `jaxpd` command: its sub-commands, and how every error ends as one readable message."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any

import typer
import typer.core

from jaxpd.cli import bench, convert, env, generate, router, serve, up, worker, workers
from jaxpd.errors import JaxpdError
from jaxpd.version import __version__

INTERRUPTED = 130  # what a shell gives a command that Ctrl-C ended


class _Commands(typer.core.TyperGroup):
    """Ends each error of a command as a message on stderr and an exit code; a traceback only with --debug."""

    def invoke(self, ctx: Any) -> Any:
        debug = bool(ctx.params.get("debug"))
        try:
            return super().invoke(ctx)
        except JaxpdError as error:
            _report(str(error), debug=debug)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            _report("interrupted", debug=debug)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # the reader of stdout went away (`| head`): typer ends that in silence
        except OSError as error:
            _report(str(error), debug=debug)
            raise typer.Exit(1) from None
        except Exception as error:
            if not _is_bug(error):
                raise
            _report(
                f"internal error, {type(error).__name__}: {error}\nThis is a bug. Please report it with the output of "
                "`jaxpd env` and of the same command as `jaxpd --debug ...`, which shows where it happened.",
                debug=debug,
            )
            raise typer.Exit(1) from None


def _is_bug(error: Exception) -> bool:
    """False for what typer raises to end a command or to say that it was called wrongly."""
    return not (isinstance(error, typer.Exit | typer.Abort) or hasattr(error, "exit_code"))


def _report(message: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"jaxpd: {message}", file=sys.stderr, flush=True)


def _show_version(value: bool) -> None:
    if value:
        print(f"jaxpd {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _jaxpd(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Serve large language models on JAX, with prefill and decode on separate device meshes."""


app.command("serve")(serve.serve)
app.command("worker")(worker.worker)
app.command("router")(router.router)
app.command("workers")(workers.workers)
app.command("up")(up.up)
app.command("down")(up.down)
app.command("generate")(generate.generate)
app.command("convert")(convert.convert)
app.command("env")(env.env)
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="jaxpd")
