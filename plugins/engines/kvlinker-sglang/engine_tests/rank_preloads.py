"""What all ranks have in common, done once in the process that they are forked from: imports, and slow preparations."""

from __future__ import annotations

import rank_jobs
from pool_groups import installed_plugins
from real_pools import publish_configuration

from kvlinker_sglang.engine.host import installed_host
from kvlinker_sglang.engine.weight_updates import watch_weight_updates
from kvlinker_sglang.page_keys import check_page_keys

__all__ = ["rank_jobs"]

publish_configuration()
installed_plugins()
check_page_keys(installed_host())  # loads SGLang's own C++
watch_weight_updates()  # looks through every module
