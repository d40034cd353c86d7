"""The table of causes. Order matters: the first rule that fits decides, so narrow ones stand before wide ones.

Pure data. Rules are written against what libraries keep saying over their versions, not against whole messages: against one
half of tests/corpus/messages, and they are judged by the other. A wrong cause is worse than none: a rule for a service, a
file or a peer needs a word that only such a message has. What each code means at length is in texts.py.
"""

from __future__ import annotations

import signal

from holdfast.insight.causes.blame import types_of
from holdfast.insight.causes.rule import OWN, Rule, ends_by
from holdfast.insight.causes.rules_machine import FILES, LIMITS
from holdfast.insight.causes.rules_torch import AGREEMENT, GPU, PEERS, WAITING

REFUSED = "the name of what it asks for, and who asks: log in or set the token (HF_TOKEN, WANDB_API_KEY, AWS keys) on every node"
UNREACHED = "proxy, DNS and firewall of that node; let one rank per node download before the others, or work offline (HF_HUB_OFFLINE=1)"
DATABASES = r"(?:psycopg2?|asyncpg|pymongo|redis|cx_Oracle|oracledb|cassandra|elasticsearch|kafka|influxdb|clickhouse_\w+|snowflake|pyodbc|trino)"
CLIENTS = (
    r"(?:requests|urllib3?|httpx|httpcore|aiohttp|botocore|boto3|s3fs|gcsfs|huggingface_hub|wandb|mlflow|comet_ml|neptune|clearml"
    r"|grpc|google|azure|paramiko|openai|anthropic|minio|cohere|litellm)"
)

SERVICES = (
    Rule(
        "HF238",
        "was refused by a service outside the job: {said}",
        REFUSED,
        says=r"gated repo|\b40[13] (?:Client Error|Forbidden|Unauthorized)|returned error 40[13]\b|RepositoryNotFound|is not a valid model identifier"
        r"|Invalid user token|Invalid token.{0,80}(?:log ?in|hugging|hub\b|wandb)|(?:invalid|incorrect|expired|missing) (?:API|access)[ _-](?:key|token)"
        r"|\bAccessDenied\b|AuthenticationException|\((?:Expired|Invalid)Token\w*\)|InvalidAccessKeyId|SignatureDoesNotMatch|NoCredentialsError|Unable to locate credentials"
        r"|DefaultCredentialsError|api[_ ]key not configured|password authentication failed|Can't load .{0,200}https://huggingface\.co"
        r"|An error occurred \((?:40[134]|NoSuchBucket|NoSuchKey|AllAccessDisabled)\) when calling"
        r"|^google\.api_core\.exceptions\.(?:Forbidden|Unauth\w+|PermissionDenied|NotFound)\b"
        r"|(?:pymysql|MySQLdb|mysql\.connector)\.[^\n]{0,80}\(?10(?:44|45)\b",
        types=types_of(
            "GatedRepoError RepositoryNotFoundError EntryNotFoundError RevisionNotFoundError NoCredentialsError DatasetNotFoundError "
            "AuthenticationError DefaultCredentialsError NotAuthenticated"
        ),
    ),
    Rule(
        "HF238",
        "could not reach a service outside the job: {said}",
        UNREACHED,
        says=r"HTTPS?Connection|urlopen error|HTTP Error \d|Max retries exceeded|CERTIFICATE_VERIFY_FAILED|Name or service not known|name resolution"
        r"|nodename nor servname|EndpointConnectionError|LocalEntryNotFound|status(?: code)?:? [45]\d\d\b|\b[45]\d\d (?:Client|Server) Error"
        r"|(?:not|n't|failed to|unable to|error) (?:\w+ )?(?:connect\w*|reach|resolve|download\w*|fetch\w*|access|load|retrieve|open|contact)\b.{0,120}(?<!see )\bhttps?://(?!docs\.|[\w.]*readthedocs)"
        r"|https?://\S+[\s'\")>:].{0,300}(?:refused|timed? ?out|unreachable|reset by|status code|failed with|[^\w.](?:40[134589]|429|50[0234])\b)"
        r"|(?:Couldn't|could not|cannot) (?:reach|find) .{0,200}on the (?:Hugging ?Face )?Hub|on the Hub or cannot be accessed"
        r"|can't connect to (?:MySQL )?server|Lost connection to MySQL|MySQL server has gone away|connection to server at .{0,120}failed"
        r"|could not connect to server|Is the server running (?:on|locally)|server closed the connection unexpectedly"
        rf"|^(?:.{{0,80}}\()?{DATABASES}\.[\w.]*(?:Connect|Timeout|Operational|Interface|ServerSelection|Network|AutoReconnect|NoBrokers)\w*\b"
        rf"|^{CLIENTS}\.[\w.]*(?:Connect|Timeout|HTTPError|HTTPStatus|SSL|Proxy|Network|Protocol|Endpoint|MaxRetry|Unavailable|Comm|Disconnected|Chunked"
        r"|Incomplete|TooManyRequests|RetryError|DeadlineExceeded|GatewayTimeout|RpcError|Status)\w*\b"
        r"|^[\w.]*(?:RateLimit|APIConnection|APITimeout|APIStatus|ServiceUnavailable|TooManyRequests|GatewayTimeout|Throttl\w*)(?:Error|Exception)?\b",
        types=types_of(
            "HTTPError URLError ConnectTimeout ReadTimeout SSLError SSLEOFError SSLZeroReturnError SSLCertVerificationError gaierror "
            "EndpointConnectionError LocalEntryNotFoundError MaxRetryError RemoteDisconnected IncompleteRead HfHubHTTPError "
            "OfflineModeIsEnabled ClientConnectorError"
        ),
        per_node=True,
    ),
    Rule(
        "HF238",
        "could not reach a service outside the job: {said}",
        UNREACHED,
        says=r"connect|timed? ?out|timeout|closed|reset|refused|aborted|broken pipe|resol|unreachable|UNAVAILABLE",
        frames=r"/(?:requests|urllib3|httpx|httpcore|aiohttp|botocore|huggingface_hub|wandb|mlflow|s3fs|gcsfs|grpc|redis|pymongo|psycopg2?|asyncpg"
        r"|pymysql|MySQLdb|kafka|paramiko)/|/urllib/request\.py|/http/client\.py|/ftplib\.py|/smtplib\.py| in do_handshake$",
        per_node=True,
    ),
)

ENDS = (
    Rule(
        "HF233",
        "knows --local_rank, and was given --local-rank as torch's launcher spells it since 2.0",
        "parser.add_argument('--local-rank', '--local_rank', type=int) takes both; or `holdfast run` in place of `holdfast launch`, and "
        "int(os.environ['LOCAL_RANK']) in the script",
        says=r"unrecognized arguments:.{0,200}--local-rank",
        stderr=r"^usage: [\s\S]{0,2000}--local_rank",
    ),
    Rule(
        "HF233",
        "was given --local-rank, which it does not know",
        "`holdfast run` in place of `holdfast launch`: it passes the rank in LOCAL_RANK only",
        says=r"(?:unrecognized arguments:|No such option|Unknown command line flag|not used by the HfArgumentParser|Could not override|Key ')"
        r".{0,200}local[-_]rank",
    ),
    Rule(
        "HF233",
        "expects --local-rank as an argument",
        "`holdfast launch` in place of `holdfast run` gives it one; or read os.environ['LOCAL_RANK'] in the script",
        says=r"arguments are required:.{0,200}local[-_]rank|Missing option.{0,20}local[-_]rank|has no attribute 'local_rank'",
    ),
    Rule(
        "HF232",
        "does not accept its arguments: {said}",
        "check what follows the script's name on the command line; options of holdfast come before it",
        says=r"^[\w./-]+(?: [\w-]+)*: error: (?:argument|the following|unrecognized|invalid|ambiguous|expected|one of|no such|too (?:few|many))|^usage: [^\n]|^Error: (?:No such option|Missing|Invalid|Got unexpected)"
        r"|^\W{0,4}(?:No such option|Missing (?:option|argument|parameter)|Got unexpected extra argument|Invalid value for)\b"
        r"|Flags parsing error|Could not consume arg|the following arguments are required|unrecognized arguments|Could not override|Key '.{0,80}' is not in struct"
        r"|^In '.{0,80}': (?:Could not find|Validation error|ConfigKeyError)|You must specify '.{0,80}', e\.g"
        r"|not used by the HfArgumentParser",
        types=types_of(
            "ArgumentError UsageError MissingParameter BadParameter NoSuchOption UnrecognizedFlagError ConfigCompositionException"
        ),
        only=OWN,
    ),
    Rule(
        "HF235",
        "was ended by a time limit",
        "ask the scheduler for more time, and let it announce the end: --preempt-signal, so that workers save and leave; they resume from there",
        says=r"DUE TO TIME LIMIT|CPU time limit exceeded|walltime|wall-?clock limit|time limit (?:exceeded|reached)|TimeLimitExceeded",
        ends=ends_by(signal.SIGXCPU),
    ),
    Rule(
        "HF235",
        "was ended from outside by {signal}",
        "somebody, or a scheduler, sent it to the worker itself; send it to `holdfast run` instead, which stops all workers in order",
        says=r"^KeyboardInterrupt|CANCELLED AT",
        ends=ends_by(
            signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM
        ),
        types=types_of("KeyboardInterrupt"),
    ),
    Rule(
        "HF223",
        "was ended by {signal}, with room left in /dev/shm",
        "a file that shrank or vanished while it was mapped (np.memmap, mmap, a data set that is being rewritten), or a disk "
        "that cannot be read: dmesg on that node",
        ends=ends_by(signal.SIGBUS),
        facts=("shm",),
        per_node=True,
    ),
    Rule(
        "HF223",
        "crashed in native code by {signal}",
        "the Python stack of that moment is on its stderr; suspects are extensions compiled for another version: rebuild, or leave out one by one",
        ends=ends_by(signal.SIGSEGV, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP),
        per_node=True,
    ),
)

RULES: tuple[Rule, ...] = (*GPU, *AGREEMENT, *LIMITS, *PEERS, *FILES, *SERVICES, *WAITING, *ENDS)
