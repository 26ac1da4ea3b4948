#include "tests/support/digests.h"

#include <gtest/gtest.h>

#include "lib/base/json.h"
#include "tests/support/sha256.h"

namespace reshard {

std::map<std::string, std::string> digests_of(const TensorValues& values) {
  std::map<std::string, std::string> out;
  for (const auto& [name, value] : values)
    out[name] =
        std::string(info(value.dtype).safetensors_name) + " " + to_string(value.shape) + " " + sha256_hex(value.bytes);
  return out;
}

std::map<std::string, std::string> read_digests(const std::string& path) {
  std::map<std::string, std::string> out;
  const auto json = parse_json(read_file(path), path);
  EXPECT_TRUE(json) << json.error().message();
  if (!json) return out;
  const std::span<const Json::Member> members = *json->as_object();
  for (const Json::Member& member : members) {
    const std::span<const Json> row = *member.value.as_array(), sizes = *row[1].as_array();
    Dims shape;
    for (const Json& n : sizes) shape.push_back(*n.as_index());
    out[member.key] =
        std::string(*row[0].as_string()) + " " + to_string(shape) + " " + std::string(*row[2].as_string());
  }
  return out;
}

std::map<std::string, std::string> manifest_digests(const std::string& directory) {
  std::map<std::string, std::string> out;
  const Json manifest = *parse_json(read_file(directory + "/reshard_manifest.json"), "manifest");
  const auto tensors = manifest.get_object("tensors");
  EXPECT_TRUE(tensors) << directory;
  if (!tensors) return out;
  for (const Json::Member& m : *tensors) out[m.key] = std::string(*m.value.get_string("digest"));
  return out;
}

}  // namespace reshard
