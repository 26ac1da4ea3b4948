// The table of formats. Adding one is one directory and one row in registry.cc.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "lib/checkpoint/format.h"

namespace reshard {

std::span<const Format* const> formats();

// The format of that name; a usage error that lists the others.
Result<const Format*> find_format(std::string_view name);

// An error where no format recognises the path.
Result<OpenCheckpoint> open_checkpoint(const std::string& path, const OpenOptions& options = {});

}  // namespace reshard
