#pragma once

#include <algorithm>
#include <map>
#include <sstream>

#include "../all_reduce/op.h"
#include "../beam_step/op.h"
#include "../draft_rows/op.h"
#include "../draw_step/op.h"
#include "../embedding/op.h"
#include "../experts/op.h"
#include "../linear/op.h"
#include "../linear_topk/op.h"
#include "../norm/op.h"
#include "../perturbed_topk/op.h"
#include "../reorder_features/op.h"
#include "../stack/op.h"
#include "../token_info_topk/op.h"
#include "../tree_attention/op.h"
#include "openvino/op/parameter.hpp"

namespace redraft {

// Sets an operator's attributes from their text.
class TextAttributes : public ov::AttributeVisitor {
  public:
    explicit TextAttributes(std::map<std::string, std::string> values) : values_(std::move(values)) {}

    void on_adapter(const std::string& name, ov::ValueAccessor<void>&) override {
        OPENVINO_THROW("attribute ", name, " is of an unsupported type");
    }
    void on_adapter(const std::string& name, ov::ValueAccessor<int64_t>& adapter) override {
        adapter.set(std::stoll(text(name)));
    }
    void on_adapter(const std::string& name, ov::ValueAccessor<double>& adapter) override {
        adapter.set(std::stod(text(name)));
    }
    void on_adapter(const std::string& name, ov::ValueAccessor<std::string>& adapter) override {
        adapter.set(text(name));
    }

  private:
    const std::string& text(const std::string& name) const {
        const auto at = values_.find(name);
        OPENVINO_ASSERT(at != values_.end(), "a step of the program lacks the attribute ", name);
        return at->second;
    }
    std::map<std::string, std::string> values_;
};

// The steps of a program, as operators that are connected to each other. Immutable: clones share it.
class Steps {
  public:
    Steps(const std::string& text, const ov::OutputVector& inputs) {
        for (const ov::Output<ov::Node>& input : inputs) {
            add_parameter(input.get_element_type(), input.get_partial_shape(), static_cast<int64_t>(values_.size()));
        }
        input_count_ = inputs.size();
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);) add(line);
        assign_buffers();
    }

    std::size_t output_count() const { return outputs_.size(); }
    ov::element::Type type(std::size_t output) const { return values_[outputs_[output]].output.get_element_type(); }
    // With the program's input shapes: the output's.
    ov::PartialShape shape(std::size_t output, const ov::Node* program) const {
        const Value& value = values_[outputs_[output]];
        ov::PartialShape shape = value.output.get_partial_shape();
        if (value.rows_of < 0) return shape;
        const ov::PartialShape& rows = program->get_input_partial_shape(value.rows_of);
        if (rows.rank().is_static()) shape[0] = rows[0] * value.rows_factor;
        return shape;
    }

    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
        OPENVINO_ASSERT(inputs.back().get_byte_size() >= constants_end_, "the program's constants end at byte ",
                        constants_end_, ": the last input has ", inputs.back().get_byte_size());
        std::vector<ov::Tensor> buffers, constants;
        for (const Constant& c : constants_)
            constants.emplace_back(c.type, c.shape, static_cast<char*>(const_cast<void*>(inputs.back().data())) + c.offset);
        for (const ov::element::Type& type : buffer_types_) buffers.emplace_back(type, ov::Shape{0, 0});
        const auto tensor = [&](std::size_t value) -> const ov::Tensor& {
            if (value < inputs.size()) return inputs[value];
            if (value - inputs.size() < constants.size()) return constants[value - inputs.size()];
            const Value& v = values_[value];
            return v.result >= 0 ? outputs[v.result] : buffers[v.buffer];
        };
        ov::TensorVector arguments, results;
        for (const Step& step : steps_) {
            arguments.clear();
            results.clear();
            for (std::size_t value : step.arguments) arguments.push_back(tensor(value));
            for (std::size_t value : step.results) results.push_back(tensor(value));
            step.op->run(results, arguments);
        }
    }

  private:
    struct Constant {
        ov::element::Type type;
        ov::Shape shape;
        std::size_t offset;
    };
    struct Value {
        ov::Output<ov::Node> output;
        int64_t rows_of;      // the program's input that this value has rows of; -1: a constant, or unknown
        int64_t rows_factor;  // how many rows for each of the input's
        int64_t result = -1;  // number among the program's outputs
        int64_t buffer = -1;
    };
    struct Step {
        std::shared_ptr<Operator> op;
        std::vector<std::size_t> arguments, results;
    };

    void add_parameter(ov::element::Type type, const ov::PartialShape& shape, int64_t rows_of) {
        parameters_.push_back(std::make_shared<ov::op::v0::Parameter>(type, shape));
        define(parameters_.back()->output(0), rows_of);
    }

    // Fields: "constant", type, offset in the last input, dimensions.
    void add_constant(const std::vector<std::string>& fields) {
        Constant constant{ov::element::Type(fields.at(1)), {}, std::stoull(fields.at(2))};
        std::istringstream dimensions(fields.at(3));
        for (std::size_t size; dimensions >> size;) constant.shape.push_back(size);
        constants_end_ = std::max(constants_end_, constant.offset + ov::shape_size(constant.shape) * constant.type.size());
        add_parameter(constant.type, constant.shape, -1);
        constants_.push_back(std::move(constant));
    }

    void define(const ov::Output<ov::Node>& output, int64_t rows_of, int64_t rows_factor = 1) {
        values_.push_back({output, rows_of, rows_factor});
    }

    static std::shared_ptr<Operator> create(const std::string& name) {
#define REDRAFT_CREATE(Name) \
    if (name == #Name) return std::make_shared<Name>();
        REDRAFT_OPERATORS(REDRAFT_CREATE)
#undef REDRAFT_CREATE
        OPENVINO_THROW("the program has a step ", name, ": expected an operator of plugins/operators/list.h");
    }

    // "operator \t arguments \t outputs \t attribute=value \t ..."; see README.md.
    void add(const std::string& line) {
        std::vector<std::string> fields;
        std::istringstream text(line);
        for (std::string field; std::getline(text, field, '\t');) fields.push_back(field);
        OPENVINO_ASSERT(fields.size() >= 3, "a step of the program is '", line, "'");
        if (fields[0] == "constant") return add_constant(fields);
        std::map<std::string, std::string> attributes;
        for (std::size_t i = 3; i < fields.size(); ++i) {
            const std::size_t equals = fields[i].find('=');
            attributes[fields[i].substr(0, equals)] = fields[i].substr(equals + 1);
        }
        Step step{create(fields[0]), {}, {}};
        TextAttributes visitor(std::move(attributes));
        step.op->visit_attributes(visitor);
        ov::OutputVector arguments;
        std::istringstream numbers(fields[1]);
        for (std::size_t value; numbers >> value;) {
            OPENVINO_ASSERT(value < values_.size(), "a step of the program takes the undefined value ", value);
            step.arguments.push_back(value);
            arguments.push_back(values_[value].output);
        }
        step.op->set_arguments(arguments);
        step.op->validate_and_infer_types();
        std::istringstream results(fields[2]);
        int64_t result;
        for (std::size_t i = 0; i < step.op->get_output_size() && results >> result; ++i) {
            step.results.push_back(values_.size());
            const int64_t rows_input = step.op->rows_input(i);
            if (rows_input == Operator::kUnknownRows) {
                define(step.op->output(i), -1);
            } else {
                const Value& like = values_[step.arguments[rows_input]];
                define(step.op->output(i), like.rows_of, like.rows_factor * step.op->rows_factor());
            }
            if (result < 0) continue;
            OPENVINO_ASSERT(result == static_cast<int64_t>(outputs_.size()), "the program's outputs are out of order");
            values_.back().result = result;
            outputs_.push_back(values_.size() - 1);
        }
        steps_.push_back(std::move(step));
    }

    // Gives values that are not outputs a buffer, reused after their last use.
    void assign_buffers() {
        std::vector<std::size_t> last(values_.size(), 0);
        for (std::size_t i = 0; i < steps_.size(); ++i) {
            for (std::size_t value : steps_[i].arguments) last[value] = i;
            for (std::size_t value : steps_[i].results) last[value] = i;
        }
        std::vector<std::size_t> busy_until;
        for (std::size_t i = 0; i < steps_.size(); ++i) {
            for (std::size_t value : steps_[i].results) {
                if (values_[value].result >= 0) continue;
                const ov::element::Type type = values_[value].output.get_element_type();
                std::size_t buffer = 0;
                while (buffer < busy_until.size() && (busy_until[buffer] >= i || buffer_types_[buffer] != type)) ++buffer;
                if (buffer == busy_until.size()) {
                    busy_until.push_back(0);
                    buffer_types_.push_back(type);
                }
                busy_until[buffer] = last[value];
                values_[value].buffer = static_cast<int64_t>(buffer);
            }
        }
    }

    std::size_t input_count_ = 0, constants_end_ = 0;
    ov::ParameterVector parameters_;
    std::vector<Constant> constants_;
    std::vector<Value> values_;
    std::vector<Step> steps_;
    std::vector<std::size_t> outputs_;
    std::vector<ov::element::Type> buffer_types_;
};

class Program : public Operator {
  public:
    OPENVINO_OP("Program", "redraft.cpu", ov::op::Op);
    using Operator::Operator;

    void validate_and_infer_types() override {
        if (!steps_) steps_ = std::make_shared<const Steps>(text_, input_values());
        set_output_size(steps_->output_count());
        for (std::size_t i = 0; i < steps_->output_count(); ++i)
            set_output_type(i, steps_->type(i), steps_->shape(i, this));
    }
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
        auto copy = std::make_shared<Program>(*this);
        copy->set_arguments(inputs);
        copy->validate_and_infer_types();
        return copy;
    }
    bool visit_attributes(ov::AttributeVisitor& visitor) override {
        visitor.on_attribute("steps", text_);
        return true;
    }
    void run(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
        steps_->run(outputs, inputs);
    }

  private:
    std::string text_;
    std::shared_ptr<const Steps> steps_;
};

}  // namespace redraft
