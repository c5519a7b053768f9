"""stub while sessions are not noted"""


class RecordedSession: ...
