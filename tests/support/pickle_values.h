// Builds a pickle from nested calls, for metadata that the installed torch does not write:
//   pickled(object("torch.m", "Metadata", dict({{text("size"), tuple({integer(2), integer(3)})}})))
#pragma once

#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/encoding/pickle_writer.h"

namespace reshard::pickled {

// Writes one value.
using Value = std::function<void(pickle::PickleWriter&)>;
using Values = std::vector<Value>;
using Entries = std::vector<std::pair<Value, Value>>;

inline Value none() {
  return [](auto& w) { w.none(); };
}
inline Value boolean(bool v) {
  return [v](auto& w) { w.boolean(v); };
}
inline Value integer(Index v) {
  return [v](auto& w) { w.integer(v); };
}
inline Value number(double v) {
  return [v](auto& w) { w.number(v); };
}
inline Value text(std::string v) {
  return [v = std::move(v)](auto& w) { w.shared_text(v); };
}
inline Value global(std::string module, std::string name) {
  return [module = std::move(module), name = std::move(name)](auto& w) { w.shared_global(module, name); };
}
inline Value tuple(Values values) {
  return [values = std::move(values)](auto& w) {
    w.mark();
    for (const Value& v : values) v(w);
    w.tuple_from_mark();
  };
}
inline Value list(Values values) {
  return [values = std::move(values)](auto& w) {
    w.empty_list();
    w.mark();
    for (const Value& v : values) v(w);
    w.append_items();
  };
}
inline Value dict(Entries entries) {
  return [entries = std::move(entries)](auto& w) {
    w.empty_dict();
    w.mark();
    for (const auto& [key, value] : entries) {
      key(w);
      value(w);
    }
    w.set_items();
  };
}
inline Value call(Value callee, Values arguments) {
  return [callee = std::move(callee), arguments = tuple(std::move(arguments))](auto& w) {
    callee(w);
    arguments(w);
    w.reduce();
  };
}
// Returns an object created without arguments, optionally with a state.
inline Value object(Value type) {
  return [type = std::move(type)](auto& w) {
    type(w);
    w.empty_tuple();
    w.new_object();
  };
}
inline Value object(Value type, Value state) {
  return [object = object(std::move(type)), state = std::move(state)](auto& w) {
    object(w);
    state(w);
    w.build();
  };
}

inline Value integers(const std::vector<Index>& values) {
  Values out;
  for (const Index v : values) out.push_back(integer(v));
  return tuple(std::move(out));
}
// Returns an object whose state is a dict of these fields.
using Fields = std::vector<std::pair<std::string, Value>>;
inline Value fields_of(const Fields& fields) {
  Entries entries;
  for (const auto& [name, value] : fields) entries.emplace_back(text(name), value);
  return dict(std::move(entries));
}

inline std::string bytes_of(const Value& value) {
  pickle::PickleWriter w;
  value(w);
  return std::move(w).finish();
}

}  // namespace reshard::pickled
