// SPDX-License-Identifier: Apache-2.0
// Precompiled headers, which nearly every source includes. Sources still include what they use.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "lib/base/json.h"
#include "lib/base/result.h"
#include "lib/base/text.h"
