from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_DEADLINE: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class Code(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODE_UNSPECIFIED: _ClassVar[Code]
    CODE_INVALID: _ClassVar[Code]
    CODE_NOT_FOUND: _ClassVar[Code]
    CODE_NO_ROOM: _ClassVar[Code]
    CODE_UNAVAILABLE: _ClassVar[Code]
    CODE_DEADLINE: _ClassVar[Code]
    CODE_ABORTED: _ClassVar[Code]
    CODE_STALE: _ClassVar[Code]
    CODE_MISMATCH: _ClassVar[Code]
    CODE_INTERNAL: _ClassVar[Code]

class FaultKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_KIND_UNSPECIFIED: _ClassVar[FaultKind]
    FAULT_KIND_DELAY: _ClassVar[FaultKind]
    FAULT_KIND_DROP: _ClassVar[FaultKind]
    FAULT_KIND_FAIL: _ClassVar[FaultKind]
    FAULT_KIND_CORRUPT: _ClassVar[FaultKind]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_DEADLINE: FinishReason
FINISH_REASON_ERROR: FinishReason
CODE_UNSPECIFIED: Code
CODE_INVALID: Code
CODE_NOT_FOUND: Code
CODE_NO_ROOM: Code
CODE_UNAVAILABLE: Code
CODE_DEADLINE: Code
CODE_ABORTED: Code
CODE_STALE: Code
CODE_MISMATCH: Code
CODE_INTERNAL: Code
FAULT_KIND_UNSPECIFIED: FaultKind
FAULT_KIND_DELAY: FaultKind
FAULT_KIND_DROP: FaultKind
FAULT_KIND_FAIL: FaultKind
FAULT_KIND_CORRUPT: FaultKind

class ExpectReply(_message.Message):
    __slots__ = ("expected", "declined")
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    expected: Expected
    declined: Declined
    def __init__(self, expected: _Optional[_Union[Expected, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("handed_over", "finished_early", "declined")
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    FINISHED_EARLY_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    handed_over: HandedOver
    finished_early: FinishedEarly
    declined: Declined
    def __init__(self, handed_over: _Optional[_Union[HandedOver, _Mapping]] = ..., finished_early: _Optional[_Union[FinishedEarly, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class AskLeaseReply(_message.Message):
    __slots__ = ("lease_granted", "declined")
    LEASE_GRANTED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    lease_granted: LeaseGranted
    declined: Declined
    def __init__(self, lease_granted: _Optional[_Union[LeaseGranted, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class RenewLeaseReply(_message.Message):
    __slots__ = ("lease_renewed", "declined")
    LEASE_RENEWED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    lease_renewed: LeaseRenewed
    declined: Declined
    def __init__(self, lease_renewed: _Optional[_Union[LeaseRenewed, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("committed", "declined")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    committed: Committed
    declined: Declined
    def __init__(self, committed: _Optional[_Union[Committed, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class DropLeaseReply(_message.Message):
    __slots__ = ("dropped", "declined")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    dropped: Dropped
    declined: Declined
    def __init__(self, dropped: _Optional[_Union[Dropped, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class FetchPrefixReply(_message.Message):
    __slots__ = ("prefix_coming", "declined")
    PREFIX_COMING_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    prefix_coming: PrefixComing
    declined: Declined
    def __init__(self, prefix_coming: _Optional[_Union[PrefixComing, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class ProbeLinkReply(_message.Message):
    __slots__ = ("probing_link", "declined")
    PROBING_LINK_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    probing_link: ProbingLink
    declined: Declined
    def __init__(self, probing_link: _Optional[_Union[ProbingLink, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class SendProbeReply(_message.Message):
    __slots__ = ("probe_sent", "declined")
    PROBE_SENT_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    probe_sent: ProbeSent
    declined: Declined
    def __init__(self, probe_sent: _Optional[_Union[ProbeSent, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("aborted", "declined")
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    aborted: Aborted
    declined: Declined
    def __init__(self, aborted: _Optional[_Union[Aborted, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class MigrateReply(_message.Message):
    __slots__ = ("migrated", "declined")
    MIGRATED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    migrated: Migrated
    declined: Declined
    def __init__(self, migrated: _Optional[_Union[Migrated, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class AskMoveReply(_message.Message):
    __slots__ = ("lease_granted", "declined")
    LEASE_GRANTED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    lease_granted: LeaseGranted
    declined: Declined
    def __init__(self, lease_granted: _Optional[_Union[LeaseGranted, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class FollowReply(_message.Message):
    __slots__ = ("followed", "declined")
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    followed: Followed
    declined: Declined
    def __init__(self, followed: _Optional[_Union[Followed, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class ReplayPrefixesReply(_message.Message):
    __slots__ = ("replaying", "declined")
    REPLAYING_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    replaying: Replaying
    declined: Declined
    def __init__(self, replaying: _Optional[_Union[Replaying, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class SetDrainingReply(_message.Message):
    __slots__ = ("draining_set", "declined")
    DRAINING_SET_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    draining_set: DrainingSet
    declined: Declined
    def __init__(self, draining_set: _Optional[_Union[DrainingSet, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class ResetPrefixCacheReply(_message.Message):
    __slots__ = ("prefix_cache_reset", "declined")
    PREFIX_CACHE_RESET_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    prefix_cache_reset: PrefixCacheReset
    declined: Declined
    def __init__(self, prefix_cache_reset: _Optional[_Union[PrefixCacheReset, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class InjectFaultReply(_message.Message):
    __slots__ = ("fault_injected", "declined")
    FAULT_INJECTED_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    fault_injected: FaultInjected
    declined: Declined
    def __init__(self, fault_injected: _Optional[_Union[FaultInjected, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("ask_id", "to", "gateway_id", "expect", "submit", "abort", "ask_lease", "renew_lease", "commit", "drop_lease", "set_draining", "reset_prefix_cache", "inject_fault", "expected", "handed_over", "finished_early", "declined", "aborted", "lease_granted", "lease_renewed", "committed", "dropped", "draining_set", "prefix_cache_reset", "fault_injected", "replay_prefixes", "replaying", "fetch_prefix", "prefix_coming", "frame", "load_report", "kv_events", "worker_info", "migrate", "ask_move", "follow", "migrated", "followed", "probe_link", "probing_link", "send_probe", "probe_sent")
    ASK_ID_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECT_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    ASK_LEASE_FIELD_NUMBER: _ClassVar[int]
    RENEW_LEASE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    DROP_LEASE_FIELD_NUMBER: _ClassVar[int]
    SET_DRAINING_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    INJECT_FAULT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    FINISHED_EARLY_FIELD_NUMBER: _ClassVar[int]
    DECLINED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_GRANTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_RENEWED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_SET_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_RESET_FIELD_NUMBER: _ClassVar[int]
    FAULT_INJECTED_FIELD_NUMBER: _ClassVar[int]
    REPLAY_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    REPLAYING_FIELD_NUMBER: _ClassVar[int]
    FETCH_PREFIX_FIELD_NUMBER: _ClassVar[int]
    PREFIX_COMING_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    LOAD_REPORT_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    WORKER_INFO_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    ASK_MOVE_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    MIGRATED_FIELD_NUMBER: _ClassVar[int]
    FOLLOWED_FIELD_NUMBER: _ClassVar[int]
    PROBE_LINK_FIELD_NUMBER: _ClassVar[int]
    PROBING_LINK_FIELD_NUMBER: _ClassVar[int]
    SEND_PROBE_FIELD_NUMBER: _ClassVar[int]
    PROBE_SENT_FIELD_NUMBER: _ClassVar[int]
    ask_id: int
    to: WorkerRef
    gateway_id: str
    expect: Expect
    submit: Submit
    abort: Abort
    ask_lease: AskLease
    renew_lease: RenewLease
    commit: Commit
    drop_lease: DropLease
    set_draining: SetDraining
    reset_prefix_cache: ResetPrefixCache
    inject_fault: InjectFault
    expected: Expected
    handed_over: HandedOver
    finished_early: FinishedEarly
    declined: Declined
    aborted: Aborted
    lease_granted: LeaseGranted
    lease_renewed: LeaseRenewed
    committed: Committed
    dropped: Dropped
    draining_set: DrainingSet
    prefix_cache_reset: PrefixCacheReset
    fault_injected: FaultInjected
    replay_prefixes: ReplayPrefixes
    replaying: Replaying
    fetch_prefix: FetchPrefix
    prefix_coming: PrefixComing
    frame: Frame
    load_report: LoadReport
    kv_events: KvEvents
    worker_info: WorkerInfo
    migrate: Migrate
    ask_move: AskMove
    follow: Follow
    migrated: Migrated
    followed: Followed
    probe_link: ProbeLink
    probing_link: ProbingLink
    send_probe: SendProbe
    probe_sent: ProbeSent
    def __init__(self, ask_id: _Optional[int] = ..., to: _Optional[_Union[WorkerRef, _Mapping]] = ..., gateway_id: _Optional[str] = ..., expect: _Optional[_Union[Expect, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., ask_lease: _Optional[_Union[AskLease, _Mapping]] = ..., renew_lease: _Optional[_Union[RenewLease, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., drop_lease: _Optional[_Union[DropLease, _Mapping]] = ..., set_draining: _Optional[_Union[SetDraining, _Mapping]] = ..., reset_prefix_cache: _Optional[_Union[ResetPrefixCache, _Mapping]] = ..., inject_fault: _Optional[_Union[InjectFault, _Mapping]] = ..., expected: _Optional[_Union[Expected, _Mapping]] = ..., handed_over: _Optional[_Union[HandedOver, _Mapping]] = ..., finished_early: _Optional[_Union[FinishedEarly, _Mapping]] = ..., declined: _Optional[_Union[Declined, _Mapping]] = ..., aborted: _Optional[_Union[Aborted, _Mapping]] = ..., lease_granted: _Optional[_Union[LeaseGranted, _Mapping]] = ..., lease_renewed: _Optional[_Union[LeaseRenewed, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., dropped: _Optional[_Union[Dropped, _Mapping]] = ..., draining_set: _Optional[_Union[DrainingSet, _Mapping]] = ..., prefix_cache_reset: _Optional[_Union[PrefixCacheReset, _Mapping]] = ..., fault_injected: _Optional[_Union[FaultInjected, _Mapping]] = ..., replay_prefixes: _Optional[_Union[ReplayPrefixes, _Mapping]] = ..., replaying: _Optional[_Union[Replaying, _Mapping]] = ..., fetch_prefix: _Optional[_Union[FetchPrefix, _Mapping]] = ..., prefix_coming: _Optional[_Union[PrefixComing, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ..., load_report: _Optional[_Union[LoadReport, _Mapping]] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ..., worker_info: _Optional[_Union[WorkerInfo, _Mapping]] = ..., migrate: _Optional[_Union[Migrate, _Mapping]] = ..., ask_move: _Optional[_Union[AskMove, _Mapping]] = ..., follow: _Optional[_Union[Follow, _Mapping]] = ..., migrated: _Optional[_Union[Migrated, _Mapping]] = ..., followed: _Optional[_Union[Followed, _Mapping]] = ..., probe_link: _Optional[_Union[ProbeLink, _Mapping]] = ..., probing_link: _Optional[_Union[ProbingLink, _Mapping]] = ..., send_probe: _Optional[_Union[SendProbe, _Mapping]] = ..., probe_sent: _Optional[_Union[ProbeSent, _Mapping]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "logit_bias_ids", "logit_biases", "logprobs", "prompt_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIASES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logit_bias_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_biases: _containers.RepeatedScalarFieldContainer[float]
    logprobs: int
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logit_bias_ids: _Optional[_Iterable[int]] = ..., logit_biases: _Optional[_Iterable[float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Branching(_message.Message):
    __slots__ = ("n", "best_of", "beam_width", "length_penalty", "early_stopping")
    N_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    n: int
    best_of: int
    beam_width: int
    length_penalty: float
    early_stopping: str
    def __init__(self, n: _Optional[int] = ..., best_of: _Optional[int] = ..., beam_width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[str] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "token_ids", "sampling", "model", "sla_class", "priority", "ttft_s", "itl_s", "age_s", "time_left_s", "cache_salt", "sequence_index", "branching")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SLA_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ITL_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_INDEX_FIELD_NUMBER: _ClassVar[int]
    BRANCHING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    model: str
    sla_class: str
    priority: int
    ttft_s: float
    itl_s: float
    age_s: float
    time_left_s: float
    cache_salt: str
    sequence_index: int
    branching: Branching
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., model: _Optional[str] = ..., sla_class: _Optional[str] = ..., priority: _Optional[int] = ..., ttft_s: _Optional[float] = ..., itl_s: _Optional[float] = ..., age_s: _Optional[float] = ..., time_left_s: _Optional[float] = ..., cache_salt: _Optional[str] = ..., sequence_index: _Optional[int] = ..., branching: _Optional[_Union[Branching, _Mapping]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("ids", "scores")
    IDS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    scores: _containers.RepeatedCompositeFieldContainer[TokenScores]
    def __init__(self, ids: _Optional[_Iterable[int]] = ..., scores: _Optional[_Iterable[_Union[TokenScores, _Mapping]]] = ...) -> None: ...

class TokenScores(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class WorkerRef(_message.Message):
    __slots__ = ("name", "incarnation", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    address: str
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Transport(_message.Message):
    __slots__ = ("scheme", "address")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    scheme: str
    address: bytes
    def __init__(self, scheme: _Optional[str] = ..., address: _Optional[bytes] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("ref", "role", "model", "model_digest", "layout", "numerics", "max_model_len", "vocab_size", "block_bytes", "total_blocks", "max_num_seqs", "site", "transports", "block_size", "kv_heads", "layers")
    REF_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ref: WorkerRef
    role: str
    model: str
    model_digest: str
    layout: str
    numerics: str
    max_model_len: int
    vocab_size: int
    block_bytes: int
    total_blocks: int
    max_num_seqs: int
    site: str
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    block_size: int
    kv_heads: int
    layers: int
    def __init__(self, ref: _Optional[_Union[WorkerRef, _Mapping]] = ..., role: _Optional[str] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., layout: _Optional[str] = ..., numerics: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_bytes: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., site: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., block_size: _Optional[int] = ..., kv_heads: _Optional[int] = ..., layers: _Optional[int] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("source", "tokens", "patience_s", "block_size")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    source: WorkerRef
    tokens: int
    patience_s: float
    block_size: int
    def __init__(self, source: _Optional[_Union[WorkerRef, _Mapping]] = ..., tokens: _Optional[int] = ..., patience_s: _Optional[float] = ..., block_size: _Optional[int] = ...) -> None: ...

class Expect(_message.Message):
    __slots__ = ("request", "gateway_id", "prefill", "fetch", "generated")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    request: Request
    gateway_id: str
    prefill: WorkerRef
    fetch: Fetch
    generated: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., gateway_id: _Optional[str] = ..., prefill: _Optional[_Union[WorkerRef, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., generated: _Optional[_Iterable[int]] = ...) -> None: ...

class Expected(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "decode", "fetch")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    request: Request
    decode: WorkerRef
    fetch: Fetch
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., decode: _Optional[_Union[WorkerRef, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ...) -> None: ...

class HandoffReport(_message.Message):
    __slots__ = ("prefill_cached_tokens", "decode_held_tokens", "computed_tokens", "kv_bytes", "kv_blocks", "transport", "queue_s", "prefill_s", "transfer_s", "exposed_s", "fetched_tokens")
    PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    FETCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefill_cached_tokens: int
    decode_held_tokens: int
    computed_tokens: int
    kv_bytes: int
    kv_blocks: int
    transport: str
    queue_s: float
    prefill_s: float
    transfer_s: float
    exposed_s: float
    fetched_tokens: int
    def __init__(self, prefill_cached_tokens: _Optional[int] = ..., decode_held_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., transport: _Optional[str] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., fetched_tokens: _Optional[int] = ...) -> None: ...

class HandedOver(_message.Message):
    __slots__ = ("request_id", "report", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    report: HandoffReport
    prompt_logprobs: Tokens
    def __init__(self, request_id: _Optional[str] = ..., report: _Optional[_Union[HandoffReport, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[Tokens, _Mapping]] = ...) -> None: ...

class FinishedEarly(_message.Message):
    __slots__ = ("request_id", "deltas", "report", "prompt_logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    report: HandoffReport
    prompt_logprobs: Tokens
    def __init__(self, request_id: _Optional[str] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., report: _Optional[_Union[HandoffReport, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[Tokens, _Mapping]] = ...) -> None: ...

class Declined(_message.Message):
    __slots__ = ("code", "message", "by")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    code: Code
    message: str
    by: str
    def __init__(self, code: _Optional[_Union[Code, str]] = ..., message: _Optional[str] = ..., by: _Optional[str] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "reason", "index", "again")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: FinishReason
    index: int
    again: bool
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., index: _Optional[int] = ..., again: _Optional[bool] = ...) -> None: ...

class Aborted(_message.Message):
    __slots__ = ("request_id", "known")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    known: bool
    def __init__(self, request_id: _Optional[str] = ..., known: _Optional[bool] = ...) -> None: ...

class AskLease(_message.Message):
    __slots__ = ("request_id", "source", "transports", "model_digest", "layout", "block_size")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    source: WorkerRef
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    model_digest: str
    layout: str
    block_size: int
    def __init__(self, request_id: _Optional[str] = ..., source: _Optional[_Union[WorkerRef, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., model_digest: _Optional[str] = ..., layout: _Optional[str] = ..., block_size: _Optional[int] = ...) -> None: ...

class LeaseGranted(_message.Message):
    __slots__ = ("request_id", "lease_id", "generation", "held_tokens", "num_spans", "expires_in_s", "destination", "scheme", "address", "block_size")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SPANS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    lease_id: str
    generation: int
    held_tokens: int
    num_spans: int
    expires_in_s: float
    destination: WorkerRef
    scheme: str
    address: bytes
    block_size: int
    def __init__(self, request_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., generation: _Optional[int] = ..., held_tokens: _Optional[int] = ..., num_spans: _Optional[int] = ..., expires_in_s: _Optional[float] = ..., destination: _Optional[_Union[WorkerRef, _Mapping]] = ..., scheme: _Optional[str] = ..., address: _Optional[bytes] = ..., block_size: _Optional[int] = ...) -> None: ...

class RenewLease(_message.Message):
    __slots__ = ("lease_id", "generation")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    generation: int
    def __init__(self, lease_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class LeaseRenewed(_message.Message):
    __slots__ = ("expires_in_s",)
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    expires_in_s: float
    def __init__(self, expires_in_s: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("request_id", "lease_id", "generation", "source", "destination", "prompt_tokens", "layout", "candidates", "cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    lease_id: str
    generation: int
    source: WorkerRef
    destination: WorkerRef
    prompt_tokens: int
    layout: str
    candidates: Tokens
    cached_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., generation: _Optional[int] = ..., source: _Optional[_Union[WorkerRef, _Mapping]] = ..., destination: _Optional[_Union[WorkerRef, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., layout: _Optional[str] = ..., candidates: _Optional[_Union[Tokens, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class DropLease(_message.Message):
    __slots__ = ("lease_id", "generation", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    generation: int
    reason: str
    def __init__(self, lease_id: _Optional[str] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Dropped(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class FetchPrefix(_message.Message):
    __slots__ = ("fetch_id", "generation", "keys", "destination", "transports", "model_digest", "layout", "patience_s", "skipped_tokens", "block_size")
    FETCH_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    fetch_id: str
    generation: int
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    destination: WorkerRef
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    model_digest: str
    layout: str
    patience_s: float
    skipped_tokens: int
    block_size: int
    def __init__(self, fetch_id: _Optional[str] = ..., generation: _Optional[int] = ..., keys: _Optional[_Iterable[bytes]] = ..., destination: _Optional[_Union[WorkerRef, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., model_digest: _Optional[str] = ..., layout: _Optional[str] = ..., patience_s: _Optional[float] = ..., skipped_tokens: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class PrefixComing(_message.Message):
    __slots__ = ("fetch_id", "num_spans")
    FETCH_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SPANS_FIELD_NUMBER: _ClassVar[int]
    fetch_id: str
    num_spans: int
    def __init__(self, fetch_id: _Optional[str] = ..., num_spans: _Optional[int] = ...) -> None: ...

class ProbeLink(_message.Message):
    __slots__ = ("source",)
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source: WorkerRef
    def __init__(self, source: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class ProbingLink(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class SendProbe(_message.Message):
    __slots__ = ("probe_id", "generation", "num_spans", "rounds", "destination", "transports", "span_bytes")
    PROBE_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    NUM_SPANS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SPAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    probe_id: str
    generation: int
    num_spans: int
    rounds: int
    destination: WorkerRef
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    span_bytes: int
    def __init__(self, probe_id: _Optional[str] = ..., generation: _Optional[int] = ..., num_spans: _Optional[int] = ..., rounds: _Optional[int] = ..., destination: _Optional[_Union[WorkerRef, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., span_bytes: _Optional[int] = ...) -> None: ...

class ProbeSent(_message.Message):
    __slots__ = ("probe_id",)
    PROBE_ID_FIELD_NUMBER: _ClassVar[int]
    probe_id: str
    def __init__(self, probe_id: _Optional[str] = ...) -> None: ...

class Migrate(_message.Message):
    __slots__ = ("request_id", "to")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    to: WorkerRef
    def __init__(self, request_id: _Optional[str] = ..., to: _Optional[_Union[WorkerRef, _Mapping]] = ...) -> None: ...

class MigrationReport(_message.Message):
    __slots__ = ("stages", "kv_blocks", "kv_bytes", "tail_blocks", "transport", "copy_s", "pause_s")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAIL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    COPY_S_FIELD_NUMBER: _ClassVar[int]
    PAUSE_S_FIELD_NUMBER: _ClassVar[int]
    stages: int
    kv_blocks: int
    kv_bytes: int
    tail_blocks: int
    transport: str
    copy_s: float
    pause_s: float
    def __init__(self, stages: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., tail_blocks: _Optional[int] = ..., transport: _Optional[str] = ..., copy_s: _Optional[float] = ..., pause_s: _Optional[float] = ...) -> None: ...

class Migrated(_message.Message):
    __slots__ = ("request_id", "report")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    report: MigrationReport
    def __init__(self, request_id: _Optional[str] = ..., report: _Optional[_Union[MigrationReport, _Mapping]] = ...) -> None: ...

class AskMove(_message.Message):
    __slots__ = ("request", "gateway_id", "source", "transports", "model_digest", "layout", "generated", "spare_tokens", "block_size")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    SPARE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    request: Request
    gateway_id: str
    source: WorkerRef
    transports: _containers.RepeatedCompositeFieldContainer[Transport]
    model_digest: str
    layout: str
    generated: _containers.RepeatedScalarFieldContainer[int]
    spare_tokens: int
    block_size: int
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., gateway_id: _Optional[str] = ..., source: _Optional[_Union[WorkerRef, _Mapping]] = ..., transports: _Optional[_Iterable[_Union[Transport, _Mapping]]] = ..., model_digest: _Optional[str] = ..., layout: _Optional[str] = ..., generated: _Optional[_Iterable[int]] = ..., spare_tokens: _Optional[int] = ..., block_size: _Optional[int] = ...) -> None: ...

class Follow(_message.Message):
    __slots__ = ("request_id", "gateway_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    gateway_id: str
    def __init__(self, request_id: _Optional[str] = ..., gateway_id: _Optional[str] = ...) -> None: ...

class Followed(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class FramesRequest(_message.Message):
    __slots__ = ("gateway_id",)
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    def __init__(self, gateway_id: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("request_id", "seq", "tokens", "finish", "error", "cached_tokens", "prompt_logprobs", "index", "score", "moved", "move")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seq: int
    tokens: Tokens
    finish: FinishReason
    error: Declined
    cached_tokens: int
    prompt_logprobs: Tokens
    index: int
    score: float
    moved: WorkerRef
    move: int
    def __init__(self, request_id: _Optional[str] = ..., seq: _Optional[int] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[_Union[Declined, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[Tokens, _Mapping]] = ..., index: _Optional[int] = ..., score: _Optional[float] = ..., moved: _Optional[_Union[WorkerRef, _Mapping]] = ..., move: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("worker", "incarnation", "number", "deltas")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    number: int
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., number: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ...) -> None: ...

class StepTimes(_message.Message):
    __slots__ = ("prefill", "decode", "prefill_error", "decode_error", "samples")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ERROR_FIELD_NUMBER: _ClassVar[int]
    DECODE_ERROR_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    prefill: _containers.RepeatedScalarFieldContainer[float]
    decode: _containers.RepeatedScalarFieldContainer[float]
    prefill_error: float
    decode_error: float
    samples: int
    def __init__(self, prefill: _Optional[_Iterable[float]] = ..., decode: _Optional[_Iterable[float]] = ..., prefill_error: _Optional[float] = ..., decode_error: _Optional[float] = ..., samples: _Optional[int] = ...) -> None: ...

class EngineLoad(_message.Message):
    __slots__ = ("total_blocks", "free_blocks", "live_blocks", "cached_blocks", "block_size", "running", "waiting", "leased_blocks", "queued_prefill_tokens", "running_context_tokens", "preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "generated_tokens", "step_times", "swapped", "swap_preemptions", "swap_total_blocks", "swap_used_blocks", "tiers", "tier_loads", "tier_recomputes")
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LIVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    SWAP_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SWAP_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TIER_LOADS_FIELD_NUMBER: _ClassVar[int]
    TIER_RECOMPUTES_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    free_blocks: int
    live_blocks: int
    cached_blocks: int
    block_size: int
    running: int
    waiting: int
    leased_blocks: int
    queued_prefill_tokens: int
    running_context_tokens: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prompt_tokens: int
    generated_tokens: int
    step_times: StepTimes
    swapped: int
    swap_preemptions: int
    swap_total_blocks: int
    swap_used_blocks: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierLoad]
    tier_loads: int
    tier_recomputes: int
    def __init__(self, total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., live_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., running_context_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., step_times: _Optional[_Union[StepTimes, _Mapping]] = ..., swapped: _Optional[int] = ..., swap_preemptions: _Optional[int] = ..., swap_total_blocks: _Optional[int] = ..., swap_used_blocks: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierLoad, _Mapping]]] = ..., tier_loads: _Optional[int] = ..., tier_recomputes: _Optional[int] = ...) -> None: ...

class TierLoad(_message.Message):
    __slots__ = ("name", "capacity_bytes", "used_bytes", "stored", "hits", "misses", "evicted", "failed", "stored_bytes", "loaded_bytes", "load_seconds", "dropped")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    name: str
    capacity_bytes: int
    used_bytes: int
    stored: int
    hits: int
    misses: int
    evicted: int
    failed: int
    stored_bytes: int
    loaded_bytes: int
    load_seconds: float
    dropped: int
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., stored: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evicted: _Optional[int] = ..., failed: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., loaded_bytes: _Optional[int] = ..., load_seconds: _Optional[float] = ..., dropped: _Optional[int] = ...) -> None: ...

class TransferCounters(_message.Message):
    __slots__ = ("scheme", "pushes", "push_bytes", "push_seconds", "receives", "receive_bytes", "in_flight", "failed", "staged_bytes")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    PUSH_BYTES_FIELD_NUMBER: _ClassVar[int]
    PUSH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVES_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    STAGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    scheme: str
    pushes: int
    push_bytes: int
    push_seconds: float
    receives: int
    receive_bytes: int
    in_flight: int
    failed: int
    staged_bytes: int
    def __init__(self, scheme: _Optional[str] = ..., pushes: _Optional[int] = ..., push_bytes: _Optional[int] = ..., push_seconds: _Optional[float] = ..., receives: _Optional[int] = ..., receive_bytes: _Optional[int] = ..., in_flight: _Optional[int] = ..., failed: _Optional[int] = ..., staged_bytes: _Optional[int] = ...) -> None: ...

class FetchCounters(_message.Message):
    __slots__ = ("source", "fetches", "blocks", "kv_bytes", "seconds", "failed")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    source: str
    fetches: int
    blocks: int
    kv_bytes: int
    seconds: float
    failed: int
    def __init__(self, source: _Optional[str] = ..., fetches: _Optional[int] = ..., blocks: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., failed: _Optional[int] = ...) -> None: ...

class LinkRate(_message.Message):
    __slots__ = ("peer", "scheme", "bytes_per_s", "best_bytes_per_s", "limit_bytes_per_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BEST_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    scheme: str
    bytes_per_s: float
    best_bytes_per_s: float
    limit_bytes_per_s: float
    def __init__(self, peer: _Optional[str] = ..., scheme: _Optional[str] = ..., bytes_per_s: _Optional[float] = ..., best_bytes_per_s: _Optional[float] = ..., limit_bytes_per_s: _Optional[float] = ...) -> None: ...

class MigrationCounters(_message.Message):
    __slots__ = ("moved", "failed", "kv_bytes", "pause_seconds")
    MOVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    moved: int
    failed: int
    kv_bytes: int
    pause_seconds: float
    def __init__(self, moved: _Optional[int] = ..., failed: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., pause_seconds: _Optional[float] = ...) -> None: ...

class LoadReport(_message.Message):
    __slots__ = ("worker", "incarnation", "number", "load", "request_ids", "transfers_in_flight", "draining", "kv_events", "transfers", "fetches", "migrations", "links")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    number: int
    load: EngineLoad
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    transfers_in_flight: int
    draining: bool
    kv_events: int
    transfers: _containers.RepeatedCompositeFieldContainer[TransferCounters]
    fetches: _containers.RepeatedCompositeFieldContainer[FetchCounters]
    migrations: MigrationCounters
    links: _containers.RepeatedCompositeFieldContainer[LinkRate]
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., number: _Optional[int] = ..., load: _Optional[_Union[EngineLoad, _Mapping]] = ..., request_ids: _Optional[_Iterable[str]] = ..., transfers_in_flight: _Optional[int] = ..., draining: _Optional[bool] = ..., kv_events: _Optional[int] = ..., transfers: _Optional[_Iterable[_Union[TransferCounters, _Mapping]]] = ..., fetches: _Optional[_Iterable[_Union[FetchCounters, _Mapping]]] = ..., migrations: _Optional[_Union[MigrationCounters, _Mapping]] = ..., links: _Optional[_Iterable[_Union[LinkRate, _Mapping]]] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("worker", "incarnation", "number", "stored", "removed", "cleared", "tier")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    number: int
    stored: _containers.RepeatedScalarFieldContainer[bytes]
    removed: _containers.RepeatedScalarFieldContainer[bytes]
    cleared: bool
    tier: str
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., number: _Optional[int] = ..., stored: _Optional[_Iterable[bytes]] = ..., removed: _Optional[_Iterable[bytes]] = ..., cleared: _Optional[bool] = ..., tier: _Optional[str] = ...) -> None: ...

class ReplayPrefixes(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Replaying(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: int
    def __init__(self, keys: _Optional[int] = ...) -> None: ...

class SetDraining(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: _Optional[bool] = ...) -> None: ...

class DrainingSet(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: _Optional[bool] = ...) -> None: ...

class ResetPrefixCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefixCacheReset(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class InjectFault(_message.Message):
    __slots__ = ("kind", "nth", "seconds")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NTH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    kind: FaultKind
    nth: int
    seconds: float
    def __init__(self, kind: _Optional[_Union[FaultKind, str]] = ..., nth: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class FaultInjected(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
