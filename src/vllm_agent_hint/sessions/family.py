"""Parents and children: who waits for whom, and what ends with whom.

A leader that waits for its workers sends nothing while they run. So while a child has a request
alive or a lease running, the last lease of its parent does not end.
"""

from collections.abc import Iterator

from vllm_agent_hint.sessions.session import Session


def why_not_link(child: Session, parent: Session, max_depth: int) -> str:
    """Why a session can't become the child of another; empty if it can. O(depth + subtree)."""
    if child.parent is parent:
        return ""
    above = list(ancestors(parent))
    if child is parent or child in above:
        return "the link would close a cycle"
    if len(above) + 1 + height(child) > max_depth:
        return f"the tree would be deeper than VLLM_AGENT_HINT_MAX_DEPTH={max_depth}"
    return ""


def link(child: Session, parent: Session) -> None:
    """Make a session the child of another, and of nobody else."""
    if child.parent is not parent:
        leave_parent(child)
        child.parent = parent
        parent.children.add(child)


def leave_parent(child: Session) -> Session | None:
    """Returns the parent that the session had."""
    parent, child.parent = child.parent, None
    if parent is not None:
        parent.children.discard(child)
    return parent


def disband(session: Session) -> None:
    """A session has ended: its children have no parent any more."""
    for child in session.children:
        child.parent = None
    session.children.clear()


def ancestors(session: Session) -> Iterator[Session]:
    """The sessions above one, nearest first."""
    above = session.parent
    while above is not None:
        yield above
        above = above.parent


def height(session: Session) -> int:
    """Sessions on the longest way down from one, itself included."""
    return 1 + max((height(child) for child in session.children), default=0)


def tree(session: Session) -> Iterator[Session]:
    """A session and all below it, children before their parents."""
    for child in list(session.children):
        yield from tree(child)
    yield session


def waits_for_children(session: Session) -> bool:
    """Whether a worker of the session is still at it."""
    return any(child.is_busy for child in session.children)
