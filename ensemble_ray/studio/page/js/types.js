// What travels between page and server, as types. The models of `ensemble_ray/studio/schemas` say what each field means; one whose name a
// value has too ends in `Schema` there.

/** @typedef {"accepted"|"running"|"waiting"|"completed"|"failed"|"cancelled"|"rejected"|"budget_exhausted"|"interrupted"} RunStatus */
/** @typedef {"pending"|"running"|"waiting"|"completed"|"failed"|"exited"|"skipped"|"cancelled"|"interrupted"} StepStatus */
/** @typedef {"queue"|"rate_limit"|"model"|"tool"|"person"|"other"} SegmentKind */
/** @typedef {{amount: string, currency: string, unpriced_calls?: number}} Cost */
/** @typedef {{ensemble: string, versions: {version: string, share: number, open_runs: number, loaded_at: number}[]}} EndpointTeam */
/** @typedef {{drain: "serving"|"draining"|"drained", open_runs: number|null, teams: EndpointTeam[]}} EndpointState */
/** @typedef {{version: string, actions: string[], has_actors: boolean, has_files: boolean, has_deliveries?: boolean, has_teams: boolean, has_schedules?: boolean, title: string, read_only_reason: string|null, roles?: string[]|null, has_quotas?: boolean}} StudioInfo */
/** @typedef {{quantity: string, limit: string, used: string, reserved: string, used_share: number, reserved_share: number}} QuotaBar */
/** @typedef {{key: string, quotas: QuotaBar[], resets_at: number|null}} Usage */

/**
 * @typedef {object} RunRow
 * @property {string} run_id
 * @property {string} ensemble
 * @property {RunStatus} status
 * @property {Record<string, string>} tags
 * @property {string} summary
 * @property {string} [subject]
 * @property {string} [failure]
 * @property {number} created_at
 * @property {number|null} ended_at
 * @property {number|null} duration_ms
 * @property {number|null} tokens
 * @property {number|null} [estimated_tokens]
 * @property {number} [reused_calls]
 * @property {number|null} [reused_tokens]
 * @property {Cost|null} cost
 * @property {number} [attempts]
 * @property {boolean} [can_resume]
 * @property {number} open_reviews
 * @property {string|null} origin_run
 * @property {string} place
 * @property {string} workflow
 * @property {number} tasks
 */
/** @typedef {{key: string, statuses: Record<string, number>, latest_at: number}} RunGroup */
/** @typedef {{runs: RunRow[], next_cursor: string|null, total_known: number, counts?: Record<string, number>, unread?: number, groups?: RunGroup[]}} RunList */
/** @typedef {{agent: string, tokens: number|null, cost: string|null, steps: number}} AgentBudget */

/**
 * @typedef {object} Budget
 * @property {{spent: number|null, allowed: number|null}} tokens
 * @property {{spent: string|null, allowed: string|null, currency: string|null}} cost
 * @property {AgentBudget[]} by_agent
 * @property {string|null} end_reason
 */
/**
 * @typedef {object} Review
 * @property {string} run_id
 * @property {string} gate_id
 * @property {string} ensemble
 * @property {string} [subject]
 * @property {string} timing
 * @property {string} step
 * @property {string} task_description
 * @property {string} task_output
 * @property {string|null} prompt
 * @property {string|null} required_role
 * @property {number} created_at
 * @property {number|null} expires_at
 * @property {string} on_timeout
 * @property {string|null} decision
 * @property {string|null} text
 * @property {string|null} comment
 * @property {boolean} timed_out
 * @property {string|null} decided_by
 * @property {string|null} [decided_role]
 * @property {number|null} decided_at
 * @property {boolean} decidable
 */
/**
 * @typedef {object} RunError
 * @property {string} class
 * @property {string} message
 * @property {string[]} [causes]
 * @property {string} [place]
 * @property {string|null} first_failed_step
 * @property {string} [what]
 * @property {string[]} [lines]
 * @property {string|null} [step]
 * @property {string|null} [fork_from]
 * @property {number} [others]
 * @property {string|null} [answer]
 * @property {string} [refusal]
 * @property {{started_at: number, ended_at: number, waited_ms: number}[]} [attempts]
 * @property {number} [requests]
 * @property {string} [remedy]
 */
/**
 * @typedef {object} RunExtra
 * @property {Record<string, unknown>} inputs
 * @property {string|null} exit_reason
 * @property {string|null} exit_reason_text
 * @property {RunError|null} error
 * @property {string|null} first_error_step
 * @property {Record<string, number>} counts
 * @property {Review[]} reviews
 * @property {Budget} budget
 * @property {{run_id: string, step: string}|null} forked_from
 * @property {string[]} forks
 * @property {number} cursor
 * @property {boolean} is_live
 * @property {string|null} problem
 * @property {string|null} [resume_advice]
 * @property {Batch[]} [batches]
 * @property {ItemRetry|null} [item_retry]
 * @property {{text: string, command: string}|null} [next_step]
 * @property {string[]} [offers]
 * @property {boolean} [can_reveal] the reader may see the values of its redactor
 */
/** @typedef {{action: "resume"|"fork"|"run", step: string|null, command: string, is_shell: boolean}} ItemRetry */
/** @typedef {{event: string, receiver: string, state: string, attempt_count: number, error: string|null, next_attempt_at: number|null}} Delivery */
/** @typedef {{batch: string, state: string, status: string, total: number, answered: number, failed: number, provider_batch: string}} Batch */
/** @typedef {RunRow & RunExtra} RunDetail */

/**
 * @typedef {object} Step
 * @property {string} id
 * @property {string|null} node
 * @property {string|null} parent
 * @property {string} kind
 * @property {string} title
 * @property {string} agent
 * @property {StepStatus} status
 * @property {number|null} number
 * @property {number} attempts
 * @property {number|null} started_at
 * @property {number|null} ended_at
 * @property {[SegmentKind, number, number][]} segments
 * @property {[string, string, number][]} tools
 * @property {{input: number|null, output: number|null, cached?: number|null}|null} tokens
 * @property {Cost|null} cost
 * @property {number|null} level
 * @property {string|null} error
 * @property {string|null} effect
 * @property {{pid: number|null, node: string|null, replica: string|null}|null} place
 * @property {boolean} reviewed
 */
/** @typedef {{steps: Step[], cursor: number}} StepList */
/** @typedef {{steps: Step[], cursor: number, run: RunDetail}} LiveSteps */
/** @typedef {{id: string, name: string, arguments: string}} RequestedCall */
/** @typedef {{cause: string, reason: string, at: number|null, wait_ms: number|null}} ModelWait */
/** @typedef {{waits: ModelWait[], number: number, most: number|null}} ModelAttempts */
/** @typedef {{iteration: number, text: string|null, reasoning: string|null, tool_calls: RequestedCall[], input_tokens: number|null, output_tokens: number|null, reasoning_tokens: number|null, cached_tokens?: number|null, latency_ms: number|null, model: string|null, started_at: number|null, attempts?: ModelAttempts|null, reused?: string|null, reused_tokens?: number|null}} Answer */
/** @typedef {{name: string, arguments: string, result: string|null, outcome: string, duration_ms: number|null, started_at: number|null, effect: string|null, iteration: number|null, repairs?: string[], log?: string[], attachments?: AttachmentInfo[]}} ToolCallDetail */
/** @typedef {{kind: string, name: string, media_type: string, size_bytes: number, sha256: string}} AttachmentInfo */

/**
 * @typedef {object} StepExtra
 * @property {{role: string, content: string, attachments?: AttachmentInfo[]}[]} prompt
 * @property {Answer[]} answers
 * @property {string[]} tools_offered
 * @property {ToolCallDetail[]} tool_calls
 * @property {string|null} output
 * @property {unknown} structured_output
 * @property {{kind: string, name: string, accepted: boolean, message: string}[]} guardrails
 * @property {{rule: string, allowed: boolean, message: string}[]} constraints
 * @property {{section: string, kept_tokens: number|null, cut_tokens: number|null, how: string}[]} context_cuts
 * @property {string[]} directives
 * @property {Review[]} reviews
 * @property {{class: string, message: string, causes: string[]}|null} failure
 * @property {ModelAttempts|null} [failed_attempts]
 * @property {string|null} fork_spec
 * @property {Record<string, number>} cut
 */
/** @typedef {Step & StepExtra} StepDetail */

/**
 * @typedef {object} FlowNode
 * @property {string} id
 * @property {number} x
 * @property {number} y
 * @property {number} w
 * @property {number} h
 * @property {string} kind
 * @property {string} title
 * @property {string} agent
 * @property {number|null} level
 * @property {boolean} critical
 * @property {string|null} group
 * @property {string[]|null} steps
 * @property {number|null} count
 * @property {Record<string, number>|null} counts
 * @property {string[]} badges
 */
/** @typedef {{from: string, to: string, points: [number, number][], kind: string, label: string|null, label_at?: [number, number]|null, critical: boolean, fired: boolean|null}} FlowEdge */
/** @typedef {{id: string, title: string, kind: string, x: number, y: number, w: number, h: number}} FlowGroup */
/** @typedef {{width: number, height: number, nodes: FlowNode[], edges: FlowEdge[], groups: FlowGroup[], mode: "dag"|"graph", critical_path: string[]}} Flow */

/** @typedef {{step: string, title: string}} PreviewedStep */
/** @typedef {{reused: PreviewedStep[], asked_again: PreviewedStep[], unknown_effects: {step: string, tool: string, arguments: string}[], blocked: string|null}} RunPreview */
/** @typedef {{status: string, tokens: number|null, duration_ms: number|null, output_digest: string|null}} ComparedSide */
/** @typedef {{id: string, title: string, a: ComparedSide|null, b: ComparedSide|null, same: boolean}} ComparedStep */
/** @typedef {{a: RunRow, b: RunRow, steps: ComparedStep[]}} ComparedRuns */
/** @typedef {{run_id: string, step: string, since: number|null, deaths: number}} ProcessTask */
/** @typedef {{run_id: string, ensemble?: string, subject?: string, known: boolean, agents: string[], more_agents: number, replica: number, replicas: number}} ProcessRun */
/** @typedef {{pid: number|null, name: string, kind: string, state: "ready"|"starting"|"silent"|"kept"|"retiring", runs: ProcessRun[], more_runs: number, queue: number|null, in_flight: ProcessTask[], more_in_flight: number, restarts: number|null, scheduler: string|null, reserved: string|null, memory_mb: number|null, note: string|null}} ProcessInfo */
/** @typedef {{name: string, requests: number, period_s: number, queue: number, permits: number, leased: number, agents: string[]}} Limiter */
/** @typedef {{name: string, state: "closed"|"open"|"half_open", processes: number, open_in: number, probe_at: number|null, last_failure: string|null, sent: number, queue: number, limit: number|null}} Breaker */
/** @typedef {{nodes: {node: string, address: string|null, processes: ProcessInfo[]}[], limiters: Limiter[], breakers: Breaker[], clusters: string[], note: string|null}} Actors */

/**
 * @typedef {object} TrendSums
 * @property {number} runs
 * @property {number} open
 * @property {number} failed
 * @property {number|null} p50_ms
 * @property {number|null} p95_ms
 * @property {number|null} tokens
 * @property {number} tokens_unknown
 * @property {string|null} cost
 * @property {number} cost_unknown
 */
/** @typedef {TrendSums & {day: string, since: number}} TrendDay */
/** @typedef {{run_id: string, status: RunStatus, created_at: number, duration_ms: number|null, tokens: number|null, cost: string|null, times: Partial<Record<"duration"|"tokens"|"cost", number>>}} UnusualRun */
/** @typedef {{ensemble: string, currency: string|null, total: TrendSums, days: TrendDay[], unusual: UnusualRun[]}} TeamTrend */
/** @typedef {{first_day: string, last_day: string, teams: TeamTrend[], more_teams: number, runs: number, counted: number, is_complete: boolean}} Trends */

/** @typedef {{id: string, team: string, created_at: number, runs: Record<string, number>, has_result: boolean, cases: number, means: Record<string, number|null>}} EvaluationRow */
/** @typedef {{evaluations: EvaluationRow[], more: number, is_complete: boolean}} Evaluations */
/** @typedef {{scorer: string, tag: string|null, cases: number, mean: number|null, low: number|null, high: number|null, method: string, errors: number}} ScoreRow */
/** @typedef {{scorer: string, cases: number, earlier: number, later: number, p_value: number, verdict: "worse"|"better"|"same"}} ComparisonRow */
/** @typedef {{value: number|null, reason: string, error: string, run_id: string}} EvaluationScore */
/** @typedef {{run_id: string, repeat: number, state: string, output: string, error: string, duration_ms: number|null, cost: string, scores: Record<string, EvaluationScore>}} EvaluationRun */
/** @typedef {{id: string, inputs: Record<string, string>, expected: unknown, tags: string[], runs: EvaluationRun[], earlier: EvaluationRun[], change: number}} EvaluationCase */
/** @typedef {{id: string, team: string, repeats: number, currency: string, scores: ScoreRow[], runs: number, errors: number, p50_ms: number|null, p95_ms: number|null, tokens: number, cost: string, judge_cost: string, cases: EvaluationCase[], more_cases: number, compared: string|null, comparison: ComparisonRow[]}} EvaluationDetail */

/** @typedef {{name: string, kind: "dag"|"trace"|"run"|null, problem: string|null, size_bytes: number, modified_at: number, workflow: string, tasks: number|null, duration_ms: number|null}} FileEntry */
/** @typedef {{folder: string, files: FileEntry[], left_out: number}} FileList */

/**
 * What a live stream tells.
 * @typedef {object} LiveListener
 * @property {(news: LiveSteps) => void} onSteps
 * @property {(answer: {step: string}) => void} onAnswer
 * @property {(token: {step: string, text: string, is_reasoning?: boolean}) => void} onToken
 * @property {() => void} onEnd
 * @property {(isConnected: boolean, retryInMs: number) => void} onConnection
 */
/**
 * Where the page's data comes from: a server, or the file that the page itself is.
 * @typedef {object} Source
 * @property {boolean} isFile
 * @property {() => Promise<StudioInfo>} info
 * @property {(filters: URLSearchParams, cursor: string|null, limit: number) => Promise<RunList>} runs
 * @property {(run: string) => Promise<RunDetail>} run
 * @property {(run: string, after: number) => Promise<StepList>} steps
 * @property {(run: string, after: number, listener: LiveListener) => () => void} live
 * @property {(run: string, step: string) => Promise<StepDetail>} step
 * @property {(run: string, step: string, field: string) => Promise<string>} text
 * @property {(run: string, sha256: string) => Promise<Blob>} attachment
 * @property {(run: string, as: string) => Promise<Flow>} flow
 * @property {(run: string|null) => Promise<Actors>} actors
 * @property {(run: string) => Promise<Delivery[]>} [deliveries]
 * @property {() => Promise<Review[]>} reviews
 * @property {(review: Review, body: {decision: string, text?: string, comment?: string}) => Promise<void>} decide
 * @property {(run: string) => Promise<RunPreview>} resumePreview
 * @property {(run: string, spec: string) => Promise<RunPreview>} forkPreview
 * @property {(run: string) => Promise<void>} cancel
 * @property {(run: string) => Promise<void>} remove
 * @property {(run: string) => Promise<string>} resume
 * @property {(run: string, spec: string, name: string|null) => Promise<string>} fork
 * @property {(a: string, b: string) => Promise<ComparedRuns>} compare
 * @property {(run: string, format: string) => Promise<Blob>} exported
 * @property {(run: string) => Promise<{first: number|null, runs: RunRow[]}>} series
 * @property {(days: number, ensemble: string) => Promise<Trends>} trends
 * @property {() => Promise<Evaluations>} evaluations
 * @property {(id: string, compare: string) => Promise<EvaluationDetail>} evaluation
 * @property {(hasVersions: boolean) => Promise<EndpointState>} endpoint
 * @property {() => Promise<ScheduleRow[]>} schedules
 * @property {(one: ScheduleRow, action: string) => Promise<string|null>} controlSchedule the id of a run that it starts
 * @property {() => Promise<Usage>} usage
 * @property {(run: string) => Promise<Record<string, string>>} reveal the values of its placeholders
 * @property {() => Promise<FileList>} files
 * @property {(name: string) => Promise<string>} file
 */

/** @typedef {{trigger: string, at: number, since: number|null, times: number, run_id: string|null, status: string|null, reason: string, file: string|null}} ScheduleFire */
/** @typedef {{ensemble: string, name: string, cron: string|null, every_s: number|null, folder: string|null, pattern: string|null, timezone: string, is_paused: boolean, next_at: number|null, waiting: number, problem: string|null, history: ScheduleFire[]}} ScheduleRow */
/** @typedef {{view: string, run: string, tab: string, params: URLSearchParams}} Route */
/**
 * A part of the page that fills it until the address names another.
 * @typedef {object} View
 * @property {HTMLElement} element
 * @property {(route: Route) => void} [update] the address changed, and the view stays
 * @property {() => void} [close]
 * @property {Record<string, (event: KeyboardEvent) => void>} [keys]
 */
/**
 * What every view is given.
 * @typedef {object} App
 * @property {Source} source
 * @property {StudioInfo} info
 * @property {(route: {view?: string, run?: string, tab?: string, params?: Record<string, string|null>}, replace?: boolean) => void} go
 * @property {(text: string) => void} announce
 * @property {(title: string) => void} setTitle
 * @property {() => void} refreshReviews
 */

export {};
