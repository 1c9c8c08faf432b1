// What every kernel answers, as Markdown: docs/support.md holds it.
#pragma once

#include <string>

namespace fa101::profile {

// Asked of plan(), for devices that stand for their architecture, as if everything were built.
std::string support_tables();

}  // namespace fa101::profile
