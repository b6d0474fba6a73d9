"""The faults: what is broken, where, and which tests ought to see it.

Where a property test is named alone, it has to see the fault without the help of an example.
"""

from typing import Final

from tests.faults.fault import Fault

# The property tests of the invariants.
STOCK_QUEUE: Final = "engine/test_queue.py::TestUnhintedQueue"
STOCK_POOL: Final = "engine/test_pool.py::TestUnhintedPool"
STOCK_SCHEDULE: Final = (
    "engine/test_scheduler_identity.py::test_unhinted_requests_are_scheduled_as_by_stock_vllm"
)
QUEUE: Final = "engine/test_queue.py::TestQueue"
SHADOW_QUEUE: Final = "engine/test_queue.py::TestShadowQueue"
POOL: Final = "engine/test_pool.py::TestHintedPool"
SESSIONS: Final = "unit/test_sam.py::TestUnbounded"
HYBRID_SESSIONS: Final = "unit/test_sam.py::TestUnboundedHybrid"
BOUNDED_SESSIONS: Final = "unit/test_sam.py::TestBounded"
SCHEDULER: Final = (
    "engine/test_scheduler_invariants.py::test_invariants_hold_whatever_happens[full-sync]"
)
BYSTANDERS: Final = (
    "engine/test_scheduler_bystanders.py::test_an_evict_never_lowers_the_hits_of_bystanders"
)

FAULTS: Final = (
    # -- 1: no hints, no change --------------------------------------------------------------------
    Fault(
        "an appended block goes to the front",
        breaks="without a hint, blocks are reused in stock's order",
        invariant=1,
        file="kvcache/queue.py",
        old="        self.append_n([block])",
        new="        self.prepend_n([block])",
        tests=(STOCK_QUEUE,),
    ),
    Fault(
        "unhinted hybrid requests are freed in our order",
        breaks="without a hint, requests are freed in stock's order",
        invariant=1,
        file="kvcache/manager.py",
        old="""\
        if request.request_id in self.tracked and self._has_own_order:
            early = self._freed_early(self.tracked[request.request_id])
""",
        new="""\
        if self._has_own_order:
            early: Any = [{} for _ in self.group_layouts()]
""",
        tests=(
            "engine/test_scheduler_retention.py::test_an_unhinted_hybrid_request_is_freed_as_stock_does",
            STOCK_SCHEDULE,
        ),
    ),
    Fault(
        "every request is tracked",
        breaks="a request without a hint makes no session",
        invariant=1,
        file="engine/arrival.py",
        old="        return None\n    sealed",
        new='        return ArrivedHint({"session_id": "x"}, None, is_foreign=False)\n    sealed',
        tests=(STOCK_SCHEDULE,),
    ),
    # -- 2: the free queue -------------------------------------------------------------------------
    Fault(
        "the boundaries of the free queue are swapped",
        breaks="each free block lies in the zone that its scalars say",
        invariant=2,
        file="kvcache/queue.py",
        old="first, second = self.fake_free_list_tail, self._boundary",
        new="second, first = self.fake_free_list_tail, self._boundary",
        tests=(QUEUE,),
    ),
    Fault(
        "freed blocks with a TTL enter the session zone",
        breaks="each free block lies in the zone that its scalars say",
        invariant=2,
        file="kvcache/queue.py",
        old="self._append_before(self._end, protected)",
        new="self._append_before(self._boundary, protected)",
        tests=(QUEUE,),
    ),
    Fault(
        "the count of free blocks drifts",
        breaks="num_free_blocks equals the list's length",
        invariant=2,
        file="kvcache/queue.py",
        old="        self.num_free_blocks -= len(taken)",
        new="        self.num_free_blocks -= n",
        tests=(QUEUE,),
    ),
    Fault(
        "a claim that grows moves no block",
        breaks="each free block lies in the zone that its scalars say",
        invariant=2,
        file="kvcache/pool.py",
        old="                if block.prev_free_block is not None:\n                    entering",
        new="                if block.prev_free_block is not None and before > after:\n"
        "                    entering",
        tests=(POOL,),
    ),
    # -- 3: counts ---------------------------------------------------------------------------------
    Fault(
        "a decrement of the session count is skipped",
        breaks="the sum of counts equals the associations held",
        invariant=3,
        file="sessions/ledger.py",
        old="session_ref_delta=-1",
        new="session_ref_delta=-(placement is not Placement.FRONT)",
        tests=(SESSIONS,),
    ),
    Fault(
        "the session count is allowed below zero",
        breaks="counts never go negative",
        invariant=3,
        file="kvcache/pool.py",
        old="            if count < 0:",
        new="            if count < -1:",
        tests=(POOL,),
    ),
    Fault(
        "the reference count follows the session count",
        breaks="SAM never changes ref_cnt",
        invariant=3,
        file="kvcache/pool.py",
        old="            block._session_ref_cnt = count\n",
        new="            block._session_ref_cnt = count\n"
        "            block.ref_cnt = max(0, block.ref_cnt + session_ref_delta)\n",
        tests=(POOL, SCHEDULER),
    ),
    Fault(
        "a mark is written whatever the block holds",
        breaks="update_block_meta refuses a block that no longer holds the expected hash",
        invariant=3,
        file="kvcache/pool.py",
        old="if block._block_hash != expected or expected is None or block.is_null:",
        new="if expected is None or block.is_null:",
        tests=(POOL,),
    ),
    Fault(
        "a reused block stays in the index",
        breaks="the sum of counts equals the associations held",
        invariant=3,
        file="engine/hooks.py",
        old="        self.sam.ledger.blocks_reused(block_ids)",
        new="        self.sam.ledger.blocks_reused(block_ids[1:])",
        tests=(SCHEDULER,),
    ),
    # -- 4: nothing is left ------------------------------------------------------------------------
    Fault(
        "a request that outlives its session is recorded",
        breaks="a request that finishes after its session was freed leaves nothing behind",
        invariant=4,
        file="sessions/manager.py",
        old="        continuation.leave(live)\n        if session.is_freed:",
        new="        continuation.leave(live)\n        if session.is_freed and not succeeded:",
        tests=(SESSIONS,),
    ),
    Fault(
        "what a preempted request holds outlives its session",
        breaks="when every session has been freed, every index is empty",
        invariant=4,
        file="sessions/manager.py",
        old="            if live.held is not None:\n                self._let_go(live.held)\n"
        "                live.held = None\n",
        new="            live.held = None\n",
        tests=(SESSIONS,),
    ),
    Fault(
        "a freed session leaves its history",
        breaks="when every session has been freed, every index is empty",
        invariant=4,
        file="sessions/manager.py",
        old="                live.held = None\n        self.history.forget_all(session)\n",
        new="                live.held = None\n        self.history.forget(session)\n",
        tests=(SESSIONS,),
    ),
    # -- 5: allocations ----------------------------------------------------------------------------
    Fault(
        "a protected block makes an allocation fail",
        breaks="an allocation succeeds exactly when stock's would",
        invariant=5,
        file="kvcache/queue.py",
        old="        assert self.num_free_blocks >= n\n        blocks =",
        new="        assert self.num_free_blocks - sum(1 for _ in self.iter_zone(Zone.TTL)) >= n\n"
        "        blocks =",
        tests=(POOL,),
    ),
    Fault(
        "protected blocks are never given out",
        breaks="an allocation succeeds exactly when stock's would",
        invariant=5,
        file="kvcache/queue.py",
        old="for zone in (Zone.SESSION, Zone.TTL):",
        new="for zone in (Zone.SESSION,):",
        tests=(
            "engine/test_scheduler_retention.py::test_an_allocation_succeeds_when_everything_is_protected",
        ),
    ),
    # -- 6: edits harm nobody ----------------------------------------------------------------------
    Fault(
        "an evict offers what other sessions claim",
        breaks="no edit changes another session's claim",
        invariant=6,
        file="sessions/ledger.py",
        old="\n            and index.is_held_only_by(chain, block_id)",
        new="",
        tests=(SESSIONS,),
    ),
    Fault(
        "an evict offers what strangers were served from",
        breaks="no edit changes the hits of requests outside the session",
        invariant=6,
        file="sessions/ledger.py",
        old="\n            and hits.get(block_id) is not block_hash",
        new="",
        tests=(SESSIONS,),
    ),
    Fault(
        "nobody inherits what strangers use",
        breaks="no edit changes the hits of requests outside the session",
        invariant=6,
        file="sessions/heirs.py",
        old="            if not self._needs_heir(chain, position):\n",
        new="            if self._needs_heir(chain, position) is not None:\n",
        tests=(BYSTANDERS,),
    ),
    Fault(
        "an edit frees blocks of a running request",
        breaks="no edit changes a block held by an active request",
        invariant=6,
        file="kvcache/pool.py",
        old="        for zone, moved in entering.items():\n",
        new="        for block_id in block_ids if placement is Placement.FRONT else ():\n"
        "            if blocks[block_id].ref_cnt and blocks[block_id].zone is Zone.ORDINARY:\n"
        "                self.free_blocks([blocks[block_id]])\n"
        "        for zone, moved in entering.items():\n",
        tests=(
            "engine/test_scheduler_retention.py::test_an_evict_does_not_touch_the_blocks_of_a_running_request",
        ),
    ),
    Fault(
        "an evicted block loses its hash",
        breaks="hints change no hash: what was evicted matches until it is reused",
        invariant=6,
        file="kvcache/pool.py",
        old="        for zone, moved in entering.items():\n",
        new="        for zone, moved in entering.items():\n"
        "            for block in moved if placement is Placement.FRONT else ():\n"
        "                self._maybe_evict_cached_block(block)\n",
        tests=(
            "engine/test_scheduler_retention.py::test_an_evicted_context_still_matches_until_it_is_reused",
        ),
    ),
    Fault(
        "leaving a shared prefix drops the deadline of the others",
        breaks="expiry of one session never removes a later deadline of another",
        invariant=6,
        file="sessions/ledger.py",
        old="                still_protected[block_ids[k]] = current\n",
        new="                pass\n",
        tests=(SESSIONS,),
    ),
    Fault(
        "an evict of a range reaches before its start",
        breaks="an edit of a range leaves what lies before it",
        invariant=6,
        file="sessions/tail.py",
        old="            if index * size < floor_token:\n                return\n"
        "            yield -(usable_without",
        new="            if (index + 1) * size <= floor_token:\n                return\n"
        "            yield -(usable_without",
        tests=("unit/test_ranges.py",),
    ),
    Fault(
        "a hinted request does without the prefix cache",
        breaks="hints change no prefix match",
        invariant=6,
        file="kvcache/manager.py",
        old="        result = super().get_computed_blocks(request, *args, **kwargs)",
        new="        request.skip_reading_prefix_cache = request.request_id in self.tracked\n"
        "        result = super().get_computed_blocks(request, *args, **kwargs)",
        tests=("engine/test_accounting.py", "engine/test_shadow.py"),
    ),
    Fault(
        "equal ids under two salts are one session",
        breaks="no edit changes another session's claim",
        invariant=6,
        file="sessions/intent.py",
        old="key=SessionKey(tenant, cache_salt, hint.session_id)",
        new="key=SessionKey(tenant, None, hint.session_id)",
        tests=(
            "engine/test_scheduler_retention.py::test_equal_ids_under_other_salts_are_other_sessions",
        ),
    ),
    # -- 7: protection never increases along a chain -----------------------------------------------
    Fault(
        "a shorter lease survives a longer one of less",
        breaks="protection never increases along a chain",
        invariant=7,
        file="sessions/leases.py",
        old="        while leases and leases[-1].deadline <= lease.deadline:\n",
        new="        while leases and leases[-1].deadline == lease.deadline:\n",
        tests=(SESSIONS,),
    ),
    Fault(
        "the deadlines of two protections are written the wrong way round",
        breaks="protection never increases along a chain",
        invariant=7,
        file="sessions/ledger.py",
        old="                spans.append((start, end, lease.deadline))\n",
        new="                spans.append((start, end, lineage.leases[-1].deadline))\n",
        tests=(SESSIONS,),
    ),
    # -- 8: greedy outputs -------------------------------------------------------------------------
    Fault(
        "a hint makes the sampler warm",
        breaks="greedy outputs are the same with hints on and off",
        invariant=8,
        file="frontend/carry.py",
        old="        params.extra_args = ours.put_into(params.extra_args)\n",
        new="        params.extra_args = ours.put_into(params.extra_args)\n"
        "        params.temperature = params.temperature or 0.7\n",
        tests=(
            "serve/test_retention.py::test_greedy_tokens_are_the_same_with_edits_flying[dense]",
        ),
    ),
    Fault(
        "a hint takes the place of other vllm_xargs",
        breaks="a hint changes nothing else of its request",
        invariant=8,
        file="frontend/carry.py",
        old="return {k: v for k, v in extra_args.items() if k not in (HINT_KEY, STAMP_KEY)}",
        new="return {k: v for k, v in extra_args.items() if k != k}",
        tests=("serve/test_wire.py::test_other_vllm_xargs_stay_as_they_are",),
    ),
    # -- 9: any bytes ------------------------------------------------------------------------------
    Fault(
        "a bad hint is a 500",
        breaks="any bytes sent as a hint get a 400 with the field's name, or are applied",
        invariant=9,
        file="frontend/doors.py",
        old="    except HintError as error:\n        return door.refusal(serving, error)\n",
        new="    except HintError as error:\n        raise RuntimeError from error\n",
        tests=("serve/test_wire.py::test_a_wrong_field_is_a_400_with_its_path",),
    ),
    Fault(
        "a salt that is no unicode goes to the engine",
        breaks="any bytes sent as a hint get a 400 with the field's name, or are applied",
        invariant=9,
        file="frontend/reading.py",
        old="    _check_salt(getattr(request, _SALT_FIELD, None))\n",
        new="",
        tests=("serve/test_wire.py::test_a_salt_that_is_not_unicode_is_a_400_beside_a_hint",),
    ),
    Fault(
        "a hint that nests too deep is no error of the client's",
        breaks="any bytes sent as a hint get a 400 with the field's name, or are applied",
        invariant=9,
        file="hints.py",
        old="        except (ValueError, RecursionError):\n",
        new="        except ValueError:\n",
        tests=("unit/test_hints.py",),
    ),
    Fault(
        "an identity may hold control characters",
        breaks="any bytes sent as a hint get a 400 with the field's name, or are applied",
        invariant=9,
        file="hints.py",
        old="    if not value.isprintable():\n",
        new="    if not value.isprintable() and value.isascii():\n",
        tests=("unit/test_hints.py",),
    ),
    Fault(
        "an error repeats what the client sent",
        breaks="error messages never repeat what the client sent",
        file="hints.py",
        old="        raise as_hint_error(first, field) from None\n",
        new='        first |= {"type": "", "msg": str(error)}\n'
        "        raise as_hint_error(first, field) from None\n",
        tests=("unit/test_hints.py::test_an_error_never_repeats_what_the_client_sent",),
    ),
    Fault(
        "ranges are taken without their flag",
        breaks="without VLLM_AGENT_HINT_RANGES a range is a 400",
        file="hints.py",
        old="        if edit.has_range and not settings.ranges:\n",
        new="        if edit.has_range and settings.max_edits < 1:\n",
        tests=("unit/test_hints.py",),
    ),
    # -- lineages ----------------------------------------------------------------------------------
    Fault(
        "one answer of n>1 releases its siblings'",
        breaks="n > 1 and beam children never release anything",
        file="sessions/continuation.py",
        old="        and not live.intent.is_sibling\n",
        new="",
        tests=("unit/test_lineages.py",),
    ),
    Fault(
        "siblings are not told from turns",
        breaks="n > 1 and beam children never release anything",
        file="engine/hooks.py",
        old="            is_sibling=stamp is not None and stamp.engine_requests > 1,\n",
        new="",
        tests=("engine/test_scheduler_retention.py",),
    ),
    Fault(
        "an aborted request supersedes",
        breaks="aborted and failed requests never release anything",
        file="sessions/manager.py",
        old="        if not succeeded or not live.is_placed:\n            return lineage, False\n",
        new="        if not succeeded or not live.is_placed:\n            return lineage, True\n",
        tests=("unit/test_lineages.py", "unit/test_sessions.py"),
    ),
    Fault(
        "an aborted request lets the other prompts of its session go",
        breaks="aborted and failed requests never release anything",
        file="sessions/manager.py",
        old="        if succeeded and not session.had_company",
        new="        if not session.had_company",
        tests=("unit/test_lineages.py",),
    ),
    Fault(
        "a title writer replaces the main agent's context",
        breaks="a smaller overlap starts another lineage",
        file="sessions/continuation.py",
        old="live.shared_tokens >= live.nearest.base_tokens:",
        new="live.shared_tokens > 0:",
        tests=("unit/test_lineages.py",),
    ),
    Fault(
        "a retry replaces what still runs",
        breaks="a request replaces a lineage only if nobody else of it is alive",
        file="sessions/continuation.py",
        old="        and live.continues not in live.company\n",
        new="",
        tests=("unit/test_lineages.py",),
    ),
    Fault(
        "a prompt that ends early cuts off what lies behind",
        breaks="a shorter request says nothing about what lies behind its end",
        file="sessions/manager.py",
        old="            replaces = not self._falls_short(lineage, prefixes)\n",
        new="            replaces = True\n",
        tests=("unit/test_sessions.py", HYBRID_SESSIONS),
    ),
    Fault(
        "regret is not noticed",
        breaks="tokens released as superseded and asked for again are counted",
        file="sessions/manager.py",
        old="            self.counters.superseded_regret_tokens += blocks *",
        new="            self.counters.superseded_regret_tokens += 0 * blocks *",
        tests=("unit/test_lineages.py",),
    ),
    Fault(
        "what was found cached counts as computed",
        breaks="only what the session's own requests computed goes to the front of the line",
        file="sessions/ledger.py",
        old="logical >= prefix.num_hits))",
        new="True))",
        tests=(HYBRID_SESSIONS,),
    ),
    Fault(
        "a request protects its own copy of a block",
        breaks="where the pool holds equal content twice, the copy that a match returns is kept",
        file="sessions/ledger.py",
        old="Newcomer(position, logical, *cached, logical",
        new="Newcomer(position, logical, prefix.block_ids[position], cached[1], logical",
        tests=("unit/test_sessions.py",),
    ),
    Fault(
        "a preempted request is not recorded",
        breaks="preempted requests are recorded before their blocks go",
        file="engine/scheduler.py",
        old="        if request.request_id in self.agent_hint.tracked:\n"
        "            self.agent_hint.request_preempted(request)\n",
        new="",
        tests=("engine/test_scheduler_retention.py",),
    ),
    Fault(
        "the state at the end of the prompt is not recorded",
        breaks="the checkpoints at the prompt's end are recorded, too",
        file="kvcache/manager.py",
        old="        ends = {prompt, prompt - 1, request.num_tokens - 1}\n",
        new="        ends = {request.num_tokens - 1}\n",
        tests=("engine/test_scheduler_retention.py",),
    ),
    Fault(
        "a turn that a stop string ends counts as aborted",
        breaks="whatever the client wanted is a success",
        file="engine/hooks.py",
        old="            if times > 1:\n",
        new="            if times > 2:\n",
        tests=("engine/test_scheduler_retention.py",),
    ),
    # -- leases and time ---------------------------------------------------------------------------
    Fault(
        "a lease expires early",
        breaks="a lease runs for its TTL",
        file="sessions/ttl.py",
        old="[e for e in self._slots[self._tick % _NUM_SLOTS] if e.due_at <= now]",
        new="[e for e in self._slots[self._tick % _NUM_SLOTS] if e.due_at <= now + 0.5]",
        tests=("unit/test_ttl.py::TestWheels",),
    ),
    Fault(
        "a lease beyond the horizon is cut short",
        breaks="a lease runs for its TTL",
        file="sessions/ttl.py",
        old="            if entry.due_at < target * TICK_SECONDS:\n",
        new="            if entry.due_at < math.inf:\n",
        tests=("unit/test_ttl.py::TestWheels",),
    ),
    Fault(
        "leases run while a request is alive",
        breaks="while a request of the lineage is alive its lease can't expire",
        file="sessions/manager.py",
        old="            self.releases.interrupt(lineage)\n"
        "            for lease in lineage.leases:\n"
        "                lease.disarm()\n",
        new="            self.releases.interrupt(lineage)\n",
        tests=("unit/test_sessions.py",),
    ),
    Fault(
        "a leader's lease ends although a worker runs",
        breaks="while a child is at it, its parent's last lease does not end",
        file="sessions/session.py",
        old="        return bool(self.live) or any(",
        new="        return any(",
        tests=("unit/test_families.py",),
    ),
    Fault(
        "a leader's lease ends although a worker holds one",
        breaks="while a child is at it, its parent's last lease does not end",
        file="sessions/session.py",
        old="        return bool(self.live) or any(lineage.leases for lineage in self.lineages)",
        new="        return bool(self.live)",
        tests=("unit/test_families.py",),
    ),
    Fault(
        "a context that was let go keeps its deadline",
        breaks="a block carries the latest deadline of its owners, and no other",
        file="sessions/ledger.py",
        old="        own = max(lineage.deadline, lineage.latest_written)\n",
        new="        own = lineage.deadline\n",
        tests=(SESSIONS,),
    ),
    Fault(
        "a reset leaves the records",
        breaks="after a reset blocks, counts and leases go",
        file="sessions/manager.py",
        old='sessions stay."""\n        self.ledger.clear()\n',
        new='sessions stay."""\n',
        tests=(SESSIONS,),
    ),
    Fault(
        "what is due is not released under pressure",
        breaks="when zone A can't satisfy an allocation, due leases are released first",
        file="sessions/manager.py",
        old="        self._expire_all(self.agenda.take_due_claims(now), now)\n",
        new="",
        tests=("engine/test_scheduler_retention.py",),
    ),
    Fault(
        "slices have no budget",
        breaks="expiry, early release and edits are cut into slices",
        file="sessions/releases.py",
        old="            budget,\n            floor_token=lineage.trim_to,\n",
        new="            len(lineage),\n            floor_token=lineage.trim_to,\n",
        tests=("unit/test_sessions.py",),
    ),
    Fault(
        "a leader waits for ever",
        breaks="a leader's wait is bounded",
        file="sessions/manager.py",
        old="        if max(lease.due_at, now) >= limit or not family",
        new="        if not family",
        tests=("unit/test_families.py",),
    ),
    Fault(
        "renewal can't be switched off",
        breaks="VLLM_AGENT_HINT_RENEW=0 leaves the lease its old deadline",
        file="sessions/manager.py",
        old="if asked or self._settings.renew else None",
        new="if asked is not None else None",
        tests=("unit/test_sam.py::TestWithoutRenewal",),
    ),
    Fault(
        "an evict leaves the history",
        breaks="evict drops the claims and the history of the context",
        file="sessions/manager.py",
        old="        self.history.forget_all(session)\n        if not session.live:\n",
        new="        if not session.live:\n",
        tests=(SESSIONS,),
    ),
    Fault(
        "a reset that fails drops the marks",
        breaks="a failed reset changes nothing",
        file="kvcache/pool.py",
        old="        if done:\n            self.drop_all_meta()\n",
        new="        if done is not None:\n            self.drop_all_meta()\n",
        tests=(POOL,),
    ),
    Fault(
        "a block that moves leaves its marks behind",
        breaks="sessions follow the content",
        file="kvcache/pool.py",
        old="        dst_block._ttl_expire_at = src_block._ttl_expire_at\n",
        new="",
        tests=(POOL,),
    ),
    # -- the order of reuse ------------------------------------------------------------------------
    Fault(
        "a context is released head first",
        breaks="a chain enters its zone tail first",
        file="sessions/ledger.py",
        old="        block_ids.reverse()\n        hashes.reverse()\n",
        new="",
        tests=("unit/test_sessions.py", "unit/test_ledger.py"),
    ),
    Fault(
        "a checkpoint goes before the blocks that it makes usable",
        breaks="a boundary's state goes after the attention blocks that it makes usable",
        file="sessions/lineage.py",
        old="                key = -(usable_without + 0.5)\n",
        new="                key = -(index + 1) * size - 0.5\n",
        tests=("unit/test_sessions.py",),
    ),
    Fault(
        "the early checkpoints of a request keep their place",
        breaks="a hinted request of a hybrid model is freed in one order across its groups",
        file="kvcache/manager.py",
        old="            missing = {i: block for i, block in freed.items() if i not in blocks}\n",
        new="            missing: dict[int, KVCacheBlock] = {}\n",
        tests=("engine/test_scheduler_retention.py",),
    ),
    Fault(
        "shadow mode reorders",
        breaks="shadow mode keeps accounts and changes no order",
        file="kvcache/queue.py",
        old='        """Leave the blocks where they are."""\n',
        new='        """Leave the blocks where they are."""\n'
        "        super().enter(blocks, placement)\n",
        tests=(SHADOW_QUEUE,),
    ),
    Fault(
        "shadow mode is not asked for",
        breaks="shadow mode keeps accounts and changes no order",
        file="engine/hooks.py",
        old="        if settings.shadow:\n",
        new="        if settings.shadow and not settings.sam:\n",
        tests=("engine/test_shadow.py",),
    ),
    Fault(
        "broken reservations are not counted",
        breaks="each broken reservation is counted",
        file="kvcache/pool.py",
        old="            self.pressure_overrides.update(block.zone for block in taken)\n",
        new="",
        tests=(POOL, "engine/test_shadow.py"),
    ),
    Fault(
        "what expires enters where an evict does",
        breaks="where a released block enters is named per cause",
        file="sessions/manager.py",
        old="            lineage, self._policy.expired, partial(",
        new="            lineage, self._policy.evicted, partial(",
        tests=("engine/test_scheduler_retention.py",),
    ),
    # -- bounds ------------------------------------------------------------------------------------
    Fault(
        "the share clips without naming its bound",
        breaks="the result says clipped and by which bound",
        file="sessions/capacity.py",
        old='                clipping.blocks["protected_share"] += self._clip',
        new="                self._clip",
        tests=("unit/test_sessions.py",),
    ),
    Fault(
        "nobody is clipped by the share",
        breaks="the protected share of the pool is a bound",
        file="sessions/capacity.py",
        old="        self._fit_share(newcomers, clipping, now)\n",
        new="",
        tests=(BOUNDED_SESSIONS,),
    ),
    Fault(
        "a tenant takes the share of all",
        breaks="the protected share of a tenant is a bound",
        file="sessions/capacity.py",
        old="        if self._max_of_tenant < self._max_retained:\n",
        new="        if self._max_of_tenant > self._max_retained:\n",
        tests=(BOUNDED_SESSIONS,),
    ),
    Fault(
        "a protected session gives way before an unprotected one",
        breaks="above the share, what has no lease gives way first",
        file="sessions/capacity.py",
        old="        for leased in (False, True):\n",
        new="        for leased in (True, False):\n",
        tests=("unit/test_sessions.py",),
    ),
    Fault(
        "a family may be a ring",
        breaks="a link that would close a cycle is rejected",
        file="sessions/family.py",
        old="    if child is parent or child in above:\n",
        new="    if child is parent:\n",
        tests=("unit/test_families.py",),
    ),
    Fault(
        "a tree is freed parents first",
        breaks="free_session_tree frees children first",
        file="sessions/family.py",
        old="    for child in list(session.children):\n        yield from tree(child)\n"
        "    yield session\n",
        new="    children = list(session.children)\n    yield session\n"
        "    for child in children:\n        yield from tree(child)\n",
        tests=("unit/test_families.py",),
    ),
    Fault(
        "histories grow without bound",
        breaks="everything is bounded",
        file="sessions/history.py",
        old="        while self.size > self._bound:\n",
        new="        while self.size > self._bound * 100:\n",
        tests=(BOUNDED_SESSIONS,),
    ),
    Fault(
        "a session with a request alive is forgotten for another",
        breaks="above max_sessions the one used longest ago goes, unless it is alive",
        file="sessions/manager.py",
        old="for s in self.sessions.values() if not s.live and not s.is_heir)",
        new="for s in self.sessions.values() if not s.is_heir)",
        tests=("unit/test_sessions.py",),
    ),
    # -- edits of requests -------------------------------------------------------------------------
    Fault(
        "the edits of an aborted request run",
        breaks="edits run after success only",
        file="engine/hooks.py",
        old="        elif all_succeeded:\n",
        new="        elif all_succeeded is not None:\n",
        tests=("engine/test_scheduler_retention.py",),
    ),
    Fault(
        "edits run although one of n>1 has not come yet",
        breaks="the edits of one HTTP request run once, after the last of its engine requests",
        file="engine/edits.py",
        old="        if stamp.may_spread or entry.ended >= stamp.engine_requests:\n",
        new="        if entry.ended:\n",
        tests=("engine/test_scheduler_retention.py",),
    ),
    Fault(
        "an engine that knows no session hides one that failed",
        breaks="a session is not missing where an engine failed",
        file="frontend/engine_calls.py",
        old="    EditStatus.REJECTED,\n    EditStatus.FAILED,\n    EditStatus.UNSUPPORTED,\n"
        "    EditStatus.MISSING,\n",
        new="    EditStatus.REJECTED,\n    EditStatus.MISSING,\n    EditStatus.UNSUPPORTED,\n"
        "    EditStatus.FAILED,\n",
        tests=("serve/test_management.py::test_a_session_is_not_missing_where_an_engine_failed",),
    ),
    Fault(
        "an operation is done as soon as one engine is",
        breaks="an operation is pending while it is so on any engine",
        file="frontend/merging.py",
        old='"pending" if any(part["status"]',
        new='"pending" if all(part["status"]',
        tests=("unit/test_merging.py",),
    ),
    Fault(
        "a stream gets an event of its own",
        breaks="the report is a field of vLLM's last chunk: clients break on other events",
        file="frontend/sse.py",
        old="""return f"{event.removesuffix(_END)},{_json(HINT_KEY)}:{_json(report)}{_END}\"""",
        new="return event + data_event({HINT_KEY: report})",
        tests=("unit/test_sse.py",),
    ),
    # -- tenants -----------------------------------------------------------------------------------
    Fault(
        "an unsigned stamp is opened",
        breaks="the tenant is never read from what a client can write",
        file="stamp.py",
        old="if not isinstance(mac, str) or not hmac.compare_digest(mac, _mac(content)):",
        new="if mac is not None and not hmac.compare_digest(mac, _mac(content)):",
        tests=("unit/test_stamp.py",),
    ),
    Fault(
        "a stamp can be read in the log",
        breaks="who reads a log learns no session id, and no stamp to send in again",
        file="stamp.py",
        old='        return f"<agent hint, operation',
        new='        return super().__repr__() + f"<agent hint, operation',
        tests=("unit/test_stamp.py",),
    ),
    Fault(
        "a tenant without a signature is believed",
        breaks="the tenant is never read from what a client can write",
        file="engine/arrival.py",
        old="    stamp = open_stamp(sealed)\n",
        new="    stamp = open_stamp(sealed)\n"
        "    if sealed is not None and stamp is None:\n"
        '        stamp = Stamp(extra_args.get(HINT_KEY), sealed.get("tenant", ""), "op")\n',
        tests=("engine/test_utility.py",),
    ),
    Fault(
        "the result of an operation is told to every tenant",
        breaks="sessions and operations of another tenant do not exist for you",
        file="engine/operations.py",
        old="        self._forget_old(now)\n        key = (tenant, operation_id)\n",
        new="        self._forget_old(now)\n        key = next(\n"
        "            (k for shelf in (self._pending, self._edited, self._plain) for k in shelf\n"
        "             if k[1] == operation_id),\n"
        "            (tenant, operation_id),\n        )\n",
        tests=("unit/test_operations.py",),
    ),
    Fault(
        "the list shows sessions of other tenants",
        breaks="sessions and operations of another tenant do not exist for you",
        file="sessions/view.py",
        old=" and key.tenant == tenant]",
        new="]",
        tests=("unit/test_view.py",),
    ),
    Fault(
        "management speaks for the default tenant",
        breaks="sessions and operations of another tenant do not exist for you",
        file="engine/utility.py",
        old='tenant=payload.get("tenant", DEFAULT_TENANT),',
        new="tenant=DEFAULT_TENANT,",
        tests=("engine/test_utility.py",),
    ),
    Fault(
        "a key that nobody checked makes a tenant",
        breaks="a tenant comes from an API key that the server accepts",
        file="frontend/tenants.py",
        old="    return key if any(matches) else None\n",
        new="    return key if matches else None\n",
        tests=("serve/test_tenants.py::test_a_path_without_a_guard_makes_nobody_a_tenant",),
    ),
    # -- failing open ------------------------------------------------------------------------------
    Fault(
        "a hook has no guard",
        breaks="no fault of the session core reaches vLLM",
        file="engine/hooks.py",
        old="    @_outlives_sam\n    def blocks_reused",
        new="    def blocks_reused",
        tests=(
            "engine/test_fail_open.py::test_a_fault_at_any_hook_leaves_plain_lru_and_the_metrics_say_so",
        ),
    ),
    Fault(
        "the clock's hook has no guard",
        breaks="no fault of the session core reaches vLLM",
        file="engine/hooks.py",
        old='            except Exception:\n                self.drop_sessions("expire_due")\n',
        new='            except ValueError:\n                self.drop_sessions("expire_due")\n',
        tests=(
            "engine/test_fail_open.py::test_a_fault_at_any_hook_leaves_plain_lru_and_the_metrics_say_so",
        ),
    ),
    Fault(
        "a fault leaves management waiting",
        breaks="what was pending when sessions are dropped has failed",
        file="engine/hooks.py",
        old="        self.outcomes.abandon(self.reason, time.monotonic())\n",
        new="",
        tests=("engine/test_utility.py",),
    ),
    Fault(
        "a fault leaves the blocks marked",
        breaks="after a fault the engine goes on as plain LRU",
        file="engine/hooks.py",
        old="        pool.observer = None\n        pool.drop_all_meta()\n",
        new="        pool.observer = None\n",
        tests=(
            "engine/test_fail_open.py::test_a_fault_at_any_hook_leaves_plain_lru_and_the_metrics_say_so",
        ),
    ),
    Fault(
        "the probe's findings are ignored",
        breaks="if a seam does not look as expected, vLLM runs stock",
        file="seams.py",
        old="failed = [f for f in probe_engine(base) if not f.ok]",
        new="failed = [f for f in probe_engine(base) if f.ok is None]",
        tests=("engine/test_seams.py",),
    ),
)
