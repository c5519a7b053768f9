from tests.support.config_files import read_once

read_once()
