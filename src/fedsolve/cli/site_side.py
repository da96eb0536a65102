"""A site's side, whatever brings the questions: the options that say who it is, and what answers for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsolve.cli.command import F, option, options
from fedsolve.cli.features import BACKBONE, data_root_option, store_option
from fedsolve.cli.keys import key_folder
from fedsolve.cli.options import allow_options, data_options
from fedsolve.cli.output import Output
from fedsolve.cli.server import class_names
from fedsolve.cli.site_rows import Diary, site_rows
from fedsolve.cli.site_table import schema_option

if TYPE_CHECKING:
    from fedsolve.federation.participant import Participant
    from fedsolve.network.answering import Answerer
    from fedsolve.privacy.policy import SitePolicy

SITE = "This site"
_DATA = "This site's data"
_SECURE = "SECURE SUMS: what this site sends is masked; the server sees totals over all sites"
_PLAIN = "PLAIN: the server sees this site's own sums"
_CHECKED = "Where there are four sites at least, this one answers only what sites have checked"
_UNCHECKED = "It answers what nobody has checked, too (its policy: verified = false)"


def trust_options(group: str) -> Callable[[F], F]:
    """Decorator: --keys and --plain, by whom a site is known and what of it may be seen."""
    return options(
        option(
            "--keys",
            metavar="DIR",
            group=group,
            help="Folder with ca.crt and this site's key.  [default: FEDSOLVE_KEYS, else keys]",
        ),
        option(
            "--plain",
            is_flag=True,
            group=group,
            help="No secure sums: let the server see this site's own sums.",
        ),
    )


def site_options(command: F) -> F:
    """Decorator: who this site is, and what it agrees to."""
    return options(
        option(
            "--policy",
            metavar="FILE",
            group=SITE,
            help="What this site answers at all (TOML).  [default: strict limits, see the threat model]",
        ),
        option("--name", metavar="NAME", required=True, group=SITE, help="Its name, as it is registered."),
        option(
            "--classes",
            metavar="A,B,...",
            group=SITE,
            help="Refuse a run with another class list.  [default: any that has this site's labels]",
        ),
        option(
            "--share-classes",
            is_flag=True,
            group=SITE,
            help="Allow sending the names of this site's classes when the server has no list.",
        ),
        allow_options(SITE),
        option(
            "--state",
            metavar="DIR",
            group=SITE,
            help="What was sent (sent.jsonl), and what must be remembered.  [default: fedsolve-client-NAME]",
        ),
    )(command)


def site_data_options(command: F) -> F:
    """Decorator: where this site's rows are, and how to read them."""
    return options(
        option("--data", metavar="DATA", required=True, group=_DATA, help="File or address, as for 'train'."),
        option(
            "--backbone",
            metavar="B",
            group=_DATA,
            help=f"What turns images into features.  [default: {BACKBONE}]",
        ),
        schema_option(
            _DATA,
            "What a row is: read the file by it, and refuse a server with another.  [default: plain numbers]",
        ),
        data_root_option,
        data_options,
        store_option,
    )(command)


def state_folder(given: dict[str, Any]) -> Path:
    """Where this site keeps its state."""
    return Path(given["state"] or f"fedsolve-client-{given['name']}")


def answerer(
    given: dict[str, Any], output: Output, folder: Path, **settings: Any
) -> tuple[Answerer, Diary, int]:
    """What answers for this site, the diary of what it sends, and how many rows it has.

    folder: where it keeps its state. settings: of `Answerer`, besides what the options say.
    """
    from fedsolve.network.answering import Answerer
    from fedsolve.privacy.policy import PolicyGuard

    policy = _policy(given)
    attending = None if given["plain"] else _SecureSide(given, folder, policy)
    output.note(_PLAIN if attending is None else f"{_SECURE}. {_CHECKED if policy.verified else _UNCHECKED}")
    data, columns = site_rows(given, output)
    diary = Diary(output, folder / "sent.jsonl")
    if attending is not None:
        attending.tell = diary.sent
    made = Answerer(
        given["name"],
        data,
        columns=columns,
        classes=class_names(given["classes"]),
        share_classes=given["share_classes"],
        networks=given["networks"],
        methods=given["methods"],
        scratch=folder,
        states=folder / "states",
        rows=folder / "rows.json",
        attend=None if attending is None else attending.attend,
        guard=PolicyGuard(policy).check,
        show=diary.enter,
        **settings,
    )
    return made, diary, len(data)


def _policy(given: dict[str, Any]) -> SitePolicy:
    from fedsolve.privacy.policy import SitePolicy

    return SitePolicy() if given["policy"] is None else SitePolicy.from_file(given["policy"])


class _SecureSide:
    """This site's side of secure sums: its key, its roster and its ledger."""

    def __init__(self, given: dict[str, Any], state: Path, policy: SitePolicy) -> None:
        from fedsolve.network.keyfolder import Keys
        from fedsolve.network.security import believed_keys, load_client_key
        from fedsolve.privacy.ledger import Ledger
        from fedsolve.privacy.signatures import signer, verifier

        keys, name = Keys(key_folder(given["keys"])), given["name"]
        self.tell: Any = None
        self._policy = policy
        self._sign = signer(load_client_key(keys, name))
        self._verify = verifier(believed_keys(keys, name))
        self._ledger = Ledger(state / "ledger")

    def attend(self, participant: Participant) -> None:
        """Let this participant take part in secure sums."""
        from fedsolve.privacy.secure_client import SecureClient

        SecureClient(
            participant,
            self._sign,
            self._verify,
            policy=self._policy,
            ledger=self._ledger,
            tell=self.tell,
        ).attend()
