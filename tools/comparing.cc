#include "tools/comparing.h"

#include <cstdlib>
#include <utility>

#include "lib/base/text.h"

namespace reshard::tools {

Result<std::unique_ptr<Comparison>> compare(OpenCheckpoint& a, OpenCheckpoint& b, const ModelOptions& model,
                                            const std::string& path_a, const std::string& path_b,
                                            const ResourceOptions& resources) {
  ComparisonOptions o;
  o.model = TRY(model.choice());
  o.config_a = find_config(path_a, model.config);
  o.config_b = find_config(path_b, model.config);
  // A converted checkpoint may have left its config behind.
  if (o.config_a.empty()) o.config_a = o.config_b;
  if (o.config_b.empty()) o.config_b = o.config_a;
  o.spool = temporary_directory();
  o.run = TRY(resources.run_options());
  return Comparison::prepare(*a.reader, *b.reader, std::move(o));
}

std::vector<std::string> structural_differences(const Comparison& c) {
  std::vector<std::string> out;
  for (const std::size_t i : c.only_a())
    out.push_back("tensor '" + printable(c.a().tensors()[i].name) + "' is only in " + c.a().root);
  for (const std::size_t i : c.only_b())
    out.push_back("tensor '" + printable(c.b().tensors()[i].name) + "' is only in " + c.b().root);
  for (const auto& p : c.reshaped())
    out.push_back("tensor '" + printable(c.a().tensors()[p.a].name) + "': shape " +
                  to_string(c.a().tensors()[p.a].shape) + " in " + c.a().root + ", " +
                  to_string(c.b().tensors()[p.b].shape) + " in " + c.b().root);
  for (std::string& text : c.objects_of_one()) out.push_back(std::move(text));
  return out;
}

std::string temporary_directory() {
  const char* t = std::getenv("TMPDIR");
  return t != nullptr && *t != '\0' ? t : "/tmp";
}

Json shape_json(const Dims& shape) {
  Json out = Json::array();
  for (const Index extent : shape) out.push_back(extent);
  return out;
}

}  // namespace reshard::tools
