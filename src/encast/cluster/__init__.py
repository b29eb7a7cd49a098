"""Jobs and servers on a Ray cluster (extra ``ray``). Nothing else imports Ray. ``encast run --ray`` imports this
package, ``encast serve --ray`` its modules.
"""

from encast.cluster.executor import RayExecutor

__all__ = ["RayExecutor"]
