// Fuzzes JSON: parsing terminates, and accepted documents are equal after writing and reading them.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "lib/base/json.h"
#include "tests/fuzz/fuzz_target.h"

namespace reshard::json_fuzz {

FUZZ_TARGET(json)(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto json = parse_json(text, "input");
  require(json || json.error().message().size() < 1000);

  Json members = Json::object();
  const auto keep = [&](const std::string& key, Json value) -> Status {
    members.set(key, std::move(value));
    return {};
  };
  const Status by_member = parse_json_members(text, "input", keep);
  require(by_member.has_value() == (json && json->is_object()));
  if (!json) return 0;

  const std::string written = to_text(*json);
  if (json->is_object()) require(to_text(members) == written);
  require(is_utf8(written));
  for (const int indent : {0, 2}) {
    const auto again = parse_json(to_text(*json, indent), "written");
    require(again && to_text(*again) == written);
  }
  return 0;
}

}  // namespace reshard::json_fuzz
